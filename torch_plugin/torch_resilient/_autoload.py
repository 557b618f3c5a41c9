"""What runs at the end of `import torch` in every process of the environment: cheap, and silent.

It makes the backend's name known and puts thin wrappers around three functions of
torch.distributed. A wrapper looks at the backend's name and, unless it is ours, goes straight to
the original.
"""

import functools
import sys

BACKEND = "resilient"

_WRAPPED = "_resilient_wrapped"


def names_us(backend):
    """True for "resilient", and for "cpu:resilient,..." where any device is served by us."""
    if not isinstance(backend, str):
        return False
    return any(part.rpartition(":")[2].strip() == BACKEND for part in backend.lower().split(","))


def autoload():
    """Entry point of the group torch.backends. Never raises: that would break `import torch`."""
    try:
        _install()
    except Exception as error:  # Whatever it is, training with another backend must go on.
        print(
            f"[resilient] the backend 'resilient' is not available in this process: {error!r}",
            file=sys.stderr,
        )


def register():
    """Entry point of the group torch.distributed.backends, for processes without autoload."""
    _install()


def _install():
    # Looked up, not imported: this runs while torch is still being imported.
    torch = sys.modules["torch"]
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available():
        return
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if getattr(c10d.init_process_group, _WRAPPED, False):
        return
    c10d.Backend.register_backend(BACKEND, _creator, extended_api=True, devices=["cpu", "cuda"])
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers.setdefault(BACKEND, _rendezvous)
    _replace("init_process_group", _wrap_init(c10d.init_process_group))
    _replace("destroy_process_group", _wrap_end(c10d.destroy_process_group))
    _replace("_abort_process_group", _wrap_end(c10d._abort_process_group))


def _replace(name, wrapper):
    """Puts the wrapper wherever torch.distributed has already bound the original."""
    original = wrapper.__wrapped__
    for module_name in (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
        "torch.distributed.device_mesh",
    ):
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, name, None) is original:
            setattr(module, name, wrapper)


def _wrap_init(original):
    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        backend = args[0] if args else kwargs.get("backend")
        if not names_us(backend):
            return original(*args, **kwargs)
        from torch_resilient import _init

        return _init.init_process_group(original, *args, **kwargs)

    setattr(init_process_group, _WRAPPED, True)
    return init_process_group


def _wrap_end(original):
    @functools.wraps(original)
    def end_process_group(*args, **kwargs):
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        world_before = world.default_pg
        try:
            return original(*args, **kwargs)
        finally:
            worlds = sys.modules.get("torch_resilient._worlds")
            if worlds is not None and world_before is not None and world.default_pg is None:
                worlds.close(world_before)

    setattr(end_process_group, _WRAPPED, True)
    return end_process_group


def _creator(options, backend_options):
    from torch_resilient import _init

    return _init.create_backend(options, backend_options)


def _rendezvous(url, **kwargs):
    from torch_resilient import _init

    return _init.rendezvous(url, **kwargs)
