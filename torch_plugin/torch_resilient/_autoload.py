"""What runs at the end of `import torch` in every process of the environment: cheap, and silent.

It makes the backend's name known and puts thin wrappers around some functions of
torch.distributed. A wrapper looks at the backend's name and, unless it is ours, or one that
RESILIENT_TAKE_OVER gives us, goes straight to the original.
"""

import atexit
import functools
import os
import sys

from torch_resilient._names import BACKEND, TAKE_OVER, TORCH_DEFAULT, names_us
from torch_resilient._wrapping import WRAPPED, replace


def served_by(backend):
    """The name under which a backend is served: those in RESILIENT_TAKE_OVER ("nccl,gloo") are
    ours, also one by one in "cpu:gloo,cuda:nccl", which None means as well."""
    text = os.environ.get(TAKE_OVER, "")
    if not text:
        return backend
    taken = text.split(",")
    if not {"nccl", "gloo"}.issuperset(taken):
        from torch_resilient import _init, _native

        _init.read_settings(_native.load(), os.environ)  # Raises: it says what is accepted.
    parts = [part.rpartition(":") for part in str(backend or TORCH_DEFAULT).lower().split(",")]
    ours = [name.strip() in taken for _, _, name in parts]
    if not any(ours):
        return backend
    if all(ours):
        return BACKEND
    return ",".join(
        device + colon + (BACKEND if taken_over else name)
        for (device, colon, name), taken_over in zip(parts, ours, strict=True)
    )


def autoload():
    """Entry point of the group torch.backends. Never raises: that would break `import torch`."""
    try:
        _install()
    except Exception as error:  # Whatever it is, training with another backend must go on.
        from torch_resilient._say import say  # Not in every process that imports torch.

        say(f"[resilient] the backend 'resilient' is not available in this process: {error!r}")


def register():
    """Entry point of the group torch.distributed.backends, for processes without autoload."""
    _install()


@functools.cache
def close_worlds_at_exit():
    """Exit handlers run in the reverse order of their registration: those that the program
    registers after it has imported torch may still use its worlds."""
    atexit.register(_close_worlds)


def _close_worlds():
    worlds = sys.modules.get("torch_resilient._worlds")
    if worlds is not None:
        worlds.registry.close_all()


def _install():
    # Looked up, not imported: this runs while torch is still being imported.
    torch = sys.modules["torch"]
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available():
        return
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if getattr(c10d.init_process_group, WRAPPED, False):
        return
    c10d.Backend.register_backend(BACKEND, _creator, extended_api=True, devices=["cpu", "cuda"])
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    rendezvous._rendezvous_handlers.setdefault(BACKEND, _rendezvous)
    if hasattr(rendezvous, "_create_c10d_store"):
        replace("_create_c10d_store", _wrap_store(rendezvous._create_c10d_store))
    replace("init_process_group", _wrap_init(c10d.init_process_group))
    replace("new_group", _wrap_new_group(c10d.new_group))
    if hasattr(c10d, "split_group"):
        replace("split_group", _wrap_split_group(c10d.split_group))
    replace("destroy_process_group", _wrap_end(c10d, c10d.destroy_process_group))
    replace("_abort_process_group", _wrap_end(c10d, c10d._abort_process_group))
    if hasattr(c10d, "_reconfigure"):  # From torch 2.14 on.
        replace("_reconfigure", _wrap_reconfigure(c10d._reconfigure))
    replace("_create_process_group_wrapper", _wrap_debug(c10d._create_process_group_wrapper))

    from torch_resilient import _frameworks

    _frameworks.install()
    close_worlds_at_exit()
    if "RANK" in os.environ:
        from torch_resilient import _ending, _presence

        _presence.at_import()
        _ending.install_hooks()  # `sys.exit(main())` looks sys.exit up before main() begins.


def _wrap_init(original):
    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        asked = args[0] if args else kwargs.get("backend")
        backend = served_by(asked)
        if not names_us(backend):
            return original(*args, **kwargs)
        from torch_resilient import _init

        if args:
            args = (backend, *args[1:])
        else:
            kwargs["backend"] = backend
        return _init.init_process_group(original, asked, *args, **kwargs)

    setattr(init_process_group, WRAPPED, True)
    return init_process_group


def _wrap_new_group(original):
    @functools.wraps(original)
    def new_group(*args, **kwargs):
        world = _current_world()
        if world is None:  # Only a world of ours has groups of ours.
            return original(*args, **kwargs)
        asked = _argument(args, kwargs, 2, "backend")
        served = None if asked is None else served_by(asked)
        if served != asked:
            args, kwargs = _with(args, kwargs, 2, "backend", served)
        args, kwargs = _with_options(args, kwargs, served or _backend_of(world.process_group))
        group = original(*args, **kwargs)
        name = getattr(group, "group_name", None)  # A rank outside the group has no object.
        if served != asked and name is not None:
            world.asked[name] = asked
        return group

    return new_group


def _wrap_split_group(original):
    @functools.wraps(original)
    def split_group(*args, **kwargs):
        world = _current_world()
        if world is not None:
            parent = _argument(args, kwargs, 0, "parent_pg") or world.process_group
            args, kwargs = _with_options(args, kwargs, _backend_of(parent))
        return original(*args, **kwargs)

    return split_group


def _wrap_store(original):
    """MASTER_PORT serves everybody: where the store of a world of ours listens there, rank 0 of rpc
    or of another backend's world is a client of it, as torch's server finds the port taken."""

    @functools.wraps(original)
    def create_c10d_store(hostname, port, rank, world_size, timeout, *args, **kwargs):
        worlds = sys.modules.get("torch_resilient._worlds")
        if rank != 0 or worlds is None or not worlds.registry.have_store_at(hostname, port):
            return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
        make = sys.modules["torch.distributed"].TCPStore
        return make(
            host_name=hostname, port=port, world_size=world_size, is_master=False, timeout=timeout
        )

    return create_c10d_store


def _backend_of(group):
    """The name, as torch's tables have it; None: they have no such group."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    return c10d._world.pg_map.get(group, (None,))[0]


def _argument(args, kwargs, place, name):
    return args[place] if len(args) > place else kwargs.get(name)


def _with(args, kwargs, place, name, value):
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _with_options(args, kwargs, backend):
    """pg_options, which has one place in new_group and split_group, as a group of ours takes it."""
    given = _argument(args, kwargs, 3, "pg_options")
    if given is None:
        return args, kwargs
    from torch_resilient import _options

    return _with(args, kwargs, 3, "pg_options", _options.taken(given, backend))


def _wrap_reconfigure(original):
    @functools.wraps(original)
    def reconfigure(uuid, handles, group=None, timeout=None, hints=None):
        work = original(uuid, handles, group, timeout, hints)
        world = _current_world()
        changed = world is not None and group in (None, world.process_group)
        if changed and world.reconfigurable is not None:
            from torch_resilient import _resize

            _resize.renumber(world.process_group)
        return work

    return reconfigure


def _wrap_debug(original):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a Gloo group in front of each backend, whose barrier
    before each operation has the group's timeout: it would fail ranks that are only late. Ours
    compares all operations anyway, and goes without."""

    @functools.wraps(original)
    def create_process_group_wrapper(*args, **kwargs):
        backend = kwargs["wrapped_pg"] if "wrapped_pg" in kwargs else args[0]
        return backend if names_us(backend.name()) else original(*args, **kwargs)

    return create_process_group_wrapper


def _current_world():
    """The world of ours that is torch's default group; None: another backend's, or none."""
    worlds = sys.modules.get("torch_resilient._worlds")
    default = sys.modules["torch.distributed.distributed_c10d"]._world.default_pg
    return worlds.registry.of(default) if worlds is not None and default is not None else None


def _wrap_end(c10d, original):
    """A finalizer may call it when the interpreter has begun to take modules down: then the table
    of modules is empty, and what is needed is held here."""
    loaded = sys.modules

    @functools.wraps(original)
    def end_process_group(*args, **kwargs):
        resize = loaded.get("torch_resilient._resize")
        if resize is not None:
            resize.refuse_former(args[0] if args else kwargs.get("group"))
        world_before = c10d._world.default_pg
        try:
            return original(*args, **kwargs)
        finally:
            worlds = loaded.get("torch_resilient._worlds")
            if worlds is not None and world_before is not None and c10d._world.default_pg is None:
                worlds.close(world_before)

    setattr(end_process_group, WRAPPED, True)
    return end_process_group


def _creator(options, backend_options):
    from torch_resilient import _init

    return _init.create_backend(options, backend_options)


def _rendezvous(url, **kwargs):
    from torch_resilient import _init

    return _init.rendezvous(url, **kwargs)
