"""docs/protocol.md is precise enough to write a client from: the one in protocol_client.py does all
that it tells, against the real server."""

import contextlib
import itertools
import shutil
import ssl
import subprocess

import protocol_client
import pytest
from make_certificates import make_ca, make_certificate
from protocol_client import Client, Closed, Connection, Line, Member, Refused, messages, new_id

_server = pytest.importorskip("torch_resilient._server")
pytest.importorskip("google.protobuf")
if shutil.which("protoc") is None:
    pytest.skip("there is no protoc", allow_module_level=True)

END_SECONDS = 10
LINK_LOST = 1  # ReportKind of <resilient/rendezvous.h>.
_jobs = itertools.count(1)


@contextlib.contextmanager
def serving(*options):
    command = [_server.binary(), "serve", "--listen", "127.0.0.1:0", "--log-level", "off"]
    process = subprocess.Popen(
        [*command, "--print-address", "--parent-death", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    host, _, port = process.stdout.readline().split()[0].rpartition(":")
    yield host, int(port)
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait(END_SECONDS)


@pytest.fixture(scope="module")
def address():
    with serving() as address:
        yield address


@pytest.fixture
def job():
    return f"job{next(_jobs)}"


@pytest.fixture
def client(address, job):
    with Client(*address, job) as client:
        yield client


def test_hello(address, job, client):
    welcome = client.welcome
    assert len(welcome.server) == 32
    assert welcome.version == protocol_client.VERSION
    assert 0 < welcome.heartbeat_interval_ms < welcome.lease_ttl_ms
    assert (welcome.key_bytes_max, welcome.value_bytes_max) == (8 << 10, 8 << 20)
    assert not welcome.session_known
    with Client(*address, job, client.session) as again:
        assert again.welcome.session_known


def test_hello_of_another_process_with_our_session(address, job, client):
    with pytest.raises(Refused) as refusal:
        Client(*address, job, client.session, incarnation=new_id())
    assert refusal.value.code == "PROTOCOL"


def test_hello_without_a_job(address):
    with pytest.raises(Refused) as refusal:
        Client(*address, "")
    assert refusal.value.code == "JOB"


def test_request_before_hello(address):
    pb = messages()
    connection = Connection(*address)
    connection.send_frame(protocol_client.REQUEST, 1, pb.Request(num_keys={}).SerializeToString())
    with pytest.raises(Closed):
        while True:
            _, _, body = connection.receive_frame(protocol_client.deadline_in(5))
            assert pb.Reply.FromString(body).failure.code == "PROTOCOL"
    connection.close()


def test_keys(client):
    assert client.call(get={"key": b"k"}).failure.code == "NOT_FOUND"
    assert not client.call(set={"key": b"k", "value": b"v\0"}).failure.code
    assert client.call(get={"key": b"k"}).value == b"v\0"
    assert client.call(append={"key": b"k", "value": b"w"}).number == 3
    assert client.call(check={"keys": [b"k"]}).flag
    assert not client.call(check={"keys": [b"k", b"l"]}).flag
    assert client.call(num_keys={}).number == 1
    assert client.call(delete={"key": b"k"}).flag
    assert not client.call(delete={"key": b"k"}).flag


def test_add(client):
    assert client.call(add={"key": b"n", "amount": -3}).number == -3
    assert client.call(get={"key": b"n"}).value == b"-3"
    client.call(set={"key": b"text", "value": b"five"})
    assert client.call(add={"key": b"text", "amount": 1}).failure.code == "WRONG_TYPE"
    assert client.call(num_keys={}).number == 2


@pytest.mark.parametrize(
    ("present", "expected", "value", "swapped"),
    [
        (None, b"", b"new", True),
        (None, b"old", b"old", False),
        (b"old", b"old", b"new", True),
        (b"old", b"", b"old", False),
        (b"old", b"other", b"old", False),
    ],
)
def test_compare_set(client, present, expected, value, swapped):
    if present is not None:
        client.call(set={"key": b"k", "value": present})
    reply = client.call(compare_set={"key": b"k", "expected": expected, "desired": b"new"})
    assert (reply.value, reply.flag) == (value, swapped)


def test_many_keys(client):
    keys = [b"k%d" % i for i in range(3)]
    client.call(multi_set={"keys": keys, "values": [b"a", b"", b"c"]})
    assert client.call(multi_get={"keys": keys[::-1]}).values == [b"c", b"", b"a"]
    assert client.call(multi_get={"keys": [*keys, b"x"]}).failure.code == "NOT_FOUND"
    waiting = client.send(multi_get={"keys": [b"x", b"k0"], "wait": True})
    client.call(set={"key": b"x", "value": b"y"})
    assert client.reply(waiting).values == [b"y", b"a"]
    uneven = client.call(multi_set={"keys": keys, "values": [b"only one"]})
    assert uneven.failure.code == "INVALID_ARGUMENT"


def test_list_keys_by_pages(client):
    keys = [b"p/%05d" % i for i in range(5000)]
    client.call(multi_set={"keys": keys, "values": [b""] * len(keys)})
    client.call(set={"key": b"q", "value": b""})
    found, after, more = [], b"", True
    while more:
        page = client.call(list_keys={"prefix": b"p/", "after": after})
        found += page.values
        after, more = page.values[-1], page.flag
    assert found == keys


def test_queue(client):
    assert client.call(queue_pop={"key": b"q"}).failure.code == "QUEUE_EMPTY"
    first = client.send(queue_pop={"key": b"q", "wait": True})
    assert client.call(queue_push={"key": b"q", "value": b"1"}).number == 0
    assert client.reply(first).value == b"1"
    assert client.call(queue_push={"key": b"q", "value": b"2"}).number == 1
    assert client.call(queue_length={"key": b"q"}).number == 1


def test_barrier_and_exchange(address, job, client):
    with Client(*address, job) as other:
        for _ in range(2):  # A key may be used again.
            arrived = client.send(barrier={"key": b"b", "size": 2})
            assert other.call(barrier={"key": b"b", "size": 2}).failure.code == ""
            assert client.reply(arrived).failure.code == ""
        mine = client.send(exchange={"key": b"e", "rank": 1, "size": 2, "value": b"one"})
        theirs = other.call(exchange={"key": b"e", "rank": 0, "size": 2, "value": b"zero"})
        assert theirs.values == client.reply(mine).values == [b"zero", b"one"]


def test_wait_and_cancel(client):
    seq = client.send(wait={"keys": [b"never"]})
    client.send_unnumbered(cancel={"seq": seq})
    assert client.reply(seq).failure.code == "CANCELLED"
    # One that was given up before it came has no effect.
    client.send_unnumbered(cancel={"seq": seq + 1})
    assert client.reply(client.send(set={"key": b"k", "value": b"v"})).failure.code == "CANCELLED"
    assert not client.call(check={"keys": [b"k"]}).flag
    # The result that was already there is the answer.
    seq = client.send(add={"key": b"n", "amount": 1})
    client.send_unnumbered(cancel={"seq": seq})
    assert client.reply(seq).number == 1


def test_replies_come_in_any_order(client):
    waiting = client.send(get={"key": b"k", "wait": True})
    assert client.call(num_keys={}).number == 0
    client.call(set={"key": b"k", "value": b"v"})
    assert client.reply(waiting).value == b"v"


def test_sent_again_is_done_once(client):
    seqs = [client.send(add={"key": b"n", "amount": 1}) for _ in range(20)]
    client.reply(seqs[0])
    client.lose()  # Whether the others were done, and answered, is not known.
    client.connect()
    assert client.welcome.session_known
    numbers = [client.reply(seq).number for seq in seqs[1:]]
    assert numbers == list(range(2, 21))
    assert client.call(get={"key": b"n"}).value == b"20"


def test_a_wait_is_resumed(address, job, client):
    seq = client.send(get={"key": b"k", "wait": True})
    client.lose()
    with Client(*address, job) as other:
        other.call(set={"key": b"k", "value": b"v"})
    client.connect()
    assert client.reply(seq).value == b"v"


def test_a_repeated_seq_is_answered_with_the_kept_result(client):
    seq = client.send(add={"key": b"n", "amount": 5}, _acknowledged=1)
    assert client.reply(seq).number == 5
    client.send(add={"key": b"n", "amount": 5}, _seq=seq, _acknowledged=1)
    assert client.reply(seq).number == 5
    # An acknowledged result is forgotten: the same seq is an error then, never done again.
    client.call(num_keys={})
    client.send(add={"key": b"n", "amount": 5}, _seq=seq)
    assert client.reply(seq).failure.code != ""
    assert client.call(get={"key": b"n"}).value == b"5"


def test_a_newer_connection_replaces_the_older(address, job, client):
    with Client(*address, job, client.session) as newer:
        with pytest.raises(Closed):
            client.reply(1)
        assert newer.call(num_keys={}).number == 0


def test_too_large(client):
    large = b"v" * ((8 << 20) + 1)
    assert client.call(set={"key": b"k", "value": large}).failure.code == "TOO_LARGE"
    key = b"k" * (8193)
    assert client.call(set={"key": key, "value": b""}).failure.code == "TOO_LARGE"
    assert client.call(num_keys={}).number == 0


def test_frame_over_the_limit_ends_the_connection(client):
    header = protocol_client.HEADER.pack((16 << 20) + 1, protocol_client.REQUEST, 0, 0, 1)
    client.connection.socket.sendall(header)
    with pytest.raises(Closed):
        client.reply(1)


def test_unknown_operation_is_an_answer(client):
    unknown = b"\xfa\x3f\x00"  # Field 1023, no bytes.
    client.connection.send_frame(protocol_client.REQUEST, 7, unknown)
    assert client.reply(7).failure.code == "UNIMPLEMENTED"
    assert client.call(num_keys={}).number == 0


def test_admin(address, job, client):
    class Admin(Line):
        ROLE = "ROLE_ADMIN"

    with Admin(*address, job) as admin:
        assert job.encode() in admin.call(status={}).status_json


def test_membership_of_two_seats(address, job):
    with Member(*address, job) as one, Member(*address, job, incarnation=new_id()) as two:
        one.join(0, 2, seat_wait_ms=20_000)
        two.join(1, 2, seat_wait_ms=20_000)
        views = [member.event("view") for member in (one, two)]
        assert views[0] == views[1]
        generation = views[0].generation
        assert [member.rank for member in views[0].members] == [0, 1]
        assert [member.endpoint for member in views[0].members] == [b"endpoint 0", b"endpoint 1"]
        for member in (one, two):
            assert not member.call(ready={"generation": generation}).failure.code
        assert one.event("running").generation == generation
        assert two.event("running").generation == generation
        one.beat(7)
        assert one.event("heartbeat_ack").beat == 7
        # The connection of the second is lost and not made again in time, and so is the link to it.
        two.lose()
        link_lost = {"kind": LINK_LOST, "generation": generation, "accused_rank": 1}
        assert not one.call(report=link_lost).failure.code
        fence = one.event("fence")
        assert fence.generation == generation
        assert (fence.cause.code, fence.cause.rank) == ("RANK_LOST", 1)
        # Another process takes the seat: the next generation has both.
        one.join(0, 2, generation=generation, seat_wait_ms=20_000)
        with Member(*address, job, incarnation=new_id()) as three:
            three.join(1, 2)
            view = one.event("view")
            assert view.generation > generation
            assert view == three.event("view")
            for member in (one, three):
                assert not member.call(leave={}).failure.code


def test_tls(job, tmp_path):
    folder = tmp_path / "secrets"
    make_ca(folder)
    make_certificate(folder)
    files = ("--tls-cert", folder / "tls.crt", "--tls-key", folder / "tls.key")
    tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with serving(*files, "--tls-ca", folder / "ca.pem") as address:
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            Client(*address, job, tls=tls)
        with pytest.raises(Refused) as refusal:
            Client(*address, job)
        assert refusal.value.code == "AUTH"
        tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        with Client(*address, job, tls=tls) as client:
            assert client.connection.socket.version() == "TLSv1.3"
            assert not client.connection.socket.session_reused
            client.call(set={"key": b"key", "value": b"value"})
            assert client.call(get={"key": b"key"}).value == b"value"
