"""Futures whose callbacks run in the order in which the program has added them."""

import torch


class OrderedFuture(torch.futures.Future):
    """The future of a collective, or of what `then` has made of one.

    Callbacks run one after another on a thread of their own, in the order in which they were added,
    never within the call that adds them. So what they start is in one order on all ranks, and has
    communicators of its own (docs/decisions/0025).

    Args:
        future (torch.futures.Future): whose result and state this one has.
        callbacks (CallbackQueue): of the communicator that the collective runs on.
    """

    def __init__(self, future, callbacks):
        super().__init__()
        callbacks.share(self, future)
        self._callbacks = callbacks

    def then(self, callback):
        """As that of `torch.futures.Future`: a future of what `callback(self)` returns."""
        return OrderedFuture(self._at_turn("then", callback), self._callbacks)

    def add_done_callback(self, callback):
        """As that of `torch.futures.Future`."""
        self._at_turn("add_done_callback", callback)

    def _at_turn(self, method, callback):
        callbacks = self._callbacks
        turn = callbacks.turn_after(self)
        made = getattr(turn, method)(lambda _: callbacks.run(callback, self))
        callbacks.add(self, turn)
        return made


def get_future(work):
    """`Work.get_future` of our Works. A send's or receive's is torch's own: these have no order."""
    future = torch.distributed.Work.get_future(work)
    return OrderedFuture(future, work.callbacks) if work.callbacks else future
