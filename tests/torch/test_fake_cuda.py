"""The CUDA devices of tests/support/fake_torch_module.cc do what tests of the plugin lean on."""

import ctypes

import conftest
import fake_device
import pytest
import rank_server as side
import torch

FLOAT, SUM, IN_PROGRESS = 7, 0, 7  # Of NCCL.


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("version", "blocking", "a", "b", "c")),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class Communicator:
    """The fake NCCL as C has it, of this rank and one more."""

    def __init__(self, path, rank, number):
        self.library = ctypes.CDLL(path)
        self.comm = ctypes.c_void_p()
        config = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=21801)
        init = self.library.ncclCommInitRankConfig
        init.argtypes = (*(ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int), ctypes.c_void_p)
        init(ctypes.byref(self.comm), 2, number, rank, ctypes.byref(config))
        self.settle()

    def settle(self):
        state = ctypes.c_int(IN_PROGRESS)
        while state.value == IN_PROGRESS:
            self.library.ncclCommGetAsyncError(self.comm, ctypes.byref(state))
        assert state.value == 0

    def sum(self, tensor, stream):
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        stream = ctypes.c_void_p(stream)
        self.library.ncclAllReduce(at, at, count, FLOAT, SUM, self.comm, stream)
        self.settle()

    def close(self):
        self.library.ncclCommFinalize(self.comm)
        self.settle()
        assert self.library.ncclCommDestroy(self.comm) == 0


@pytest.fixture
def world(rank_server):
    if why := fake_device.refusal():
        pytest.skip(why)
    worlds = conftest.world_at(rank_server, "none")
    world = next(worlds)
    yield world
    assert next(worlds, None) is None


def sharing():
    fake = fake_device.load()
    host = torch.arange(6.0).view(2, 3)
    for twin in (fake.tensor(host, 1), fake.tensor(host.t(), 1).t()):
        assert twin.device == torch.device("cuda:1") and twin.is_cuda
        assert twin.data_ptr() == host.data_ptr() and twin.stride() == host.stride()
        assert torch.equal(fake.host(twin), host)
    part = fake.tensor(host)[1]
    assert part.device == torch.device("cuda:0") and part.data_ptr() == host[1].data_ptr()
    kept = fake.host(fake.tensor(torch.ones(1000)))  # Its first owner is gone.
    assert kept.sum() == 1000


def devices():
    fake = fake_device.load()
    assert torch.cuda.is_available() and torch.cuda.device_count() == fake.DEVICES
    assert torch.cuda.current_device() == fake.device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == fake.device() == 1
        assert fake.current_stream().device == torch.device("cuda:1")
    torch.cuda.set_device(2)
    assert fake.device() == 2
    library = ctypes.CDLL(fake.library)  # The instance that a loader of the path gets.
    number = ctypes.c_int()
    assert library.cudaGetDevice(ctypes.byref(number)) == 0 and number.value == 2


def streams():
    fake = fake_device.load()
    default = fake.current_stream()
    assert default.stream_id == 0 and fake.native_handle(default) == 0
    with fake.stream() as one:
        assert fake.current_stream() == one != default
        assert fake.native_handle(one) != 0
        with fake.stream(device=1) as other:
            assert fake.current_stream() == one and fake.current_stream(1) == other
        with fake.stream(default):
            assert fake.current_stream() == default
    assert fake.current_stream() == default


def order():
    fake = fake_device.load()
    source, between, result = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    producer, consumer = fake.new_stream(), fake.new_stream()
    event = torch.Event("cuda")
    with fake.hold(producer) as hold:
        fake.copy(between, source, producer)
        event.record(producer)
        consumer.wait_event(event)
        fake.copy(result, between, consumer)
        hold.wait_until_reached()
        assert hold.reached and not event.query()
        assert not producer.query() and not consumer.query()
        fake.new_stream().synchronize()  # Another one is not in their order.
        assert not between.any() and not result.any()
    consumer.synchronize()
    assert event.query() and consumer.query()
    event.synchronize()
    assert torch.equal(result, source)
    done = []
    fake.enqueue(lambda: done.append(result.sum().item()), consumer)
    fake.synchronize()
    assert done == [6]
    del event
    assert fake.counts()["events"] == 0 and fake.counts()["misuse"] == []


def copies():
    fake = fake_device.load()
    source = torch.arange(12.0).view(3, 4)
    device = torch.empty(3, 4, device="cuda:1")
    device.copy_(source)
    assert torch.equal(device.cpu(), source)
    turned = device.t().contiguous()
    assert turned.device == torch.device("cuda:1") and turned.is_contiguous()
    assert torch.equal(turned.cpu(), source.t())
    assert torch.equal(source.to("cuda:3").clone().to("cpu"), source)
    target = torch.zeros(3, 4)
    twin = fake.tensor(target, 1)
    with fake.stream(device=1) as stream, fake.hold(stream):
        twin.copy_(device)  # In the order of the current stream: not yet.
        assert not target.any()
    stream.synchronize()
    assert torch.equal(target, source)
    device.record_stream(stream)


def torch_cuda():
    """The streams and events of torch.cuda and of torch.accelerator are these."""
    fake = fake_device.load()
    default = torch.cuda.current_stream()
    assert default == torch.cuda.default_stream() == torch.accelerator.current_stream()
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    target = torch.zeros(4)
    with torch.cuda.stream(side), fake.hold():
        assert torch.cuda.current_stream() == fake.current_stream() == side
        fake.tensor(target).fill_(3)
        event.record(side)
        default.wait_event(event)
        assert not default.query() and not target.any()
    assert torch.cuda.current_stream() == default
    torch.cuda.synchronize()
    assert default.query() and target.sum() == 12
    with torch.cuda.stream(torch.cuda.Stream(device=1)) as _:
        assert fake.current_stream(1).stream_id != 0
    assert torch.accelerator.device_count() == fake.DEVICES


def kernels():
    fake_device.load()
    torch.manual_seed(1)
    ones = torch.ones(3, device="cuda:1")
    ones += torch.arange(3, device="cuda:1")
    assert ones.device == torch.device("cuda:1") and ones.tolist() == [1, 2, 3]
    assert torch.equal(torch.cat([ones, ones]).cpu(), torch.tensor([1.0, 2, 3, 1, 2, 3]))
    copied = ones.to("cpu", non_blocking=True)
    torch.cuda.synchronize(1)
    assert copied.sum().item() == 6
    out = torch.empty(0, device="cuda:1")
    assert torch.add(ones, 1, out=out) is out and out.tolist() == [2, 3, 4]
    assert torch.equal(torch.stack([ones, out]).max(0).values, out)
    assert ones[ones > 1].tolist() == [2, 3]


def training():
    """Of a model on the device, as of one on the CPU."""
    fake_device.load()
    losses = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(1)
        layers = (
            torch.nn.Linear(4, 8),
            torch.nn.LayerNorm(8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 2),
        )
        model = torch.nn.Sequential(*layers).to(device)
        optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
        inputs, targets = torch.randn(5, 4).to(device), torch.tensor([0, 1, 0, 1, 0]).to(device)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:]) and losses[2] < losses[0]


def collective(rank):
    """Of two processes: behind what is on the producer's stream, ahead of the consumer's."""
    fake = fake_device.load()
    number = UniqueId()
    if rank == 0:
        ctypes.CDLL(fake.library).ncclGetUniqueId(ctypes.byref(number))
        side.tell(bytes(number.bytes))
    else:
        ctypes.memmove(number.bytes, side.hear(), 128)
    communicator = Communicator(fake.library, rank, number)
    data, result = torch.zeros(3), torch.zeros(3)
    producer, own = fake.new_stream(), fake.new_stream()
    with fake.stream(producer), fake.hold():
        fake.tensor(data).fill_(rank + 1)
        own.wait_stream(producer)
        communicator.sum(data, fake.native_handle(own))
        producer.wait_stream(own)
        fake.copy(result, data)
        assert not own.query() and not result.any()
        side.tell("held")
        side.hear()
        assert not own.query() and not result.any()
    producer.synchronize()
    assert result.tolist() == [3, 3, 3]
    communicator.close()
    assert fake.counts()["misuse"] == []


def control():
    fake = fake_device.load()
    fake.change("refuse_events=1")
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.Event("cuda").record(fake.current_stream())
    with pytest.raises(ValueError, match="not a script"):
        fake.change("refuse_nothing=1")
    fake.change("refuse_events=0")
    event = torch.Event("cuda")
    event.record(fake.current_stream())
    assert fake.wait("events", 1) and fake.counts()["events"] == 1


@pytest.mark.parametrize(
    "function", [sharing, devices, streams, order, copies, torch_cuda, kernels, training, control]
)
def test_fake_cuda(world, function):
    world.run(function, 1)


def test_collective_of_two_processes_is_in_the_order_of_streams(world):
    ranks = [world.start_rank(collective, rank, 2, rank) for rank in range(2)]
    ranks[1].say(ranks[0].told())
    for rank in ranks:
        assert rank.told() == "held"
    ranks[1].say("go on")  # Its data is there, and the other's is not.
    ranks[0].say("go on")
    for rank in ranks:
        rank.value()
