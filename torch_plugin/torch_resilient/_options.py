"""What a program says of NCCL in pg_options=: NcclOptions, or by habit ProcessGroupNCCL.Options."""

from torch._C._distributed_c10d import Backend

from torch_resilient import _errors, _names, _native

_NOT_SET = (None, -(2**31))  # As NCCL's configuration says it.
# What torch's configuration has too, under the same name.
_SAME = (
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "net_name",
    "traffic_class",
    "comm_name",
    "collnet_enable",
    "cta_policy",
    "nvls_ctas",
    "max_p2p_peers",
)
_ALONE = "each group has communicators of its own, so that the failure of one ends no other"
# What cannot be had but for the value that says how it is anyway, and why.
_REFUSED = {
    "blocking": (0, "a communicator whose calls wait for the peers cannot be aborted"),
    "split_share": (0, _ALONE),
    "shrink_share": (0, _ALONE),
    "split_from": (None, _ALONE),
    "lazy_init": (False, "a group connects at its first use where no device_id= binds it"),
    "use_pg_for_symm_mem_rendezvous": (False, "symmetric memory is not served"),
}


def taken(given, backend):
    """What stands for `given`, the pg_options of a group of that backend: NcclOptions where its
    CUDA tensors are ours, else as it was, for another backend. ConfigError for what cannot be had.
    """
    if given is None or not _names.serves(backend, "cuda"):
        return given
    native = _native.load()
    if isinstance(given, native.NcclOptions):
        return given
    if hasattr(given, "config") and hasattr(given, "is_high_priority_stream"):
        return native.NcclOptions(**_translated(given))
    if isinstance(given, Backend.Options):
        return given  # Torch's base, or Gloo's: it says nothing of NCCL.
    raise _errors.ConfigError(
        f"pg_options={given!r:.200}: CUDA tensors of this group take torch_resilient.NcclOptions"
    )


def ours(native, given):
    """The NcclOptions that `taken` has left; None: there are none."""
    return given if isinstance(given, native.NcclOptions) else None


def _translated(given):
    """The fields of NcclOptions. All that is said is taken over or refused: nothing is dropped."""
    fields = {"is_high_priority_stream": bool(given.is_high_priority_stream)}
    refused = []
    for name in dir(given.config):
        value = getattr(given.config, name)
        if name.startswith("_") or callable(value) or value in _NOT_SET:
            continue
        if name in _SAME:
            fields[name] = value
        elif value != _REFUSED.get(name, (None, ""))[0]:
            refused.append((name, value))
    for name in ("split_from", "lazy_init", "use_pg_for_symm_mem_rendezvous"):
        value = getattr(given, name, _REFUSED[name][0])
        if value != _REFUSED[name][0]:
            refused.append((name, value))
    if not refused:
        return fields
    unknown = (None, "it is not known here")
    reasons = (
        f"{name}={value!r:.60} ({_REFUSED.get(name, unknown)[1]})" for name, value in refused
    )
    raise _errors.ConfigError(
        f"pg_options: {type(given).__qualname__} with {', '.join(reasons)} cannot be had; leave it"
        " out, or pass torch_resilient.NcclOptions(...)"
    )


def __getattr__(name):
    if name != "NcclOptions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _native.load().NcclOptions
