"""Goal: the examples of docs/operations.md work. Method: as far as one machine can: the manifest is
read as YAML and its commands, probes and units are tried with the real binary; systemd checks the
unit; the Slurm script runs with scontrol and srun that pass their work on.

    python3 tests/ranks/check_examples.py BINARY
"""

import configparser
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import yaml

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"
PATIENCE = 20.0
BINARY = ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status_of(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Example(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.token = self.directory / "token"
        self.token.write_text("an-example-token-of-enough-characters-0123456789\n")
        self.token.chmod(0o600)

    def start(self, command, **options):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)

        def end():
            process.kill()
            process.wait()
            process.stderr.close()

        self.addCleanup(end)
        return process

    def eventually(self, condition, text):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), deadline, text)


class Kubernetes(Example):
    def setUp(self):
        super().setUp()
        with open(EXAMPLES / "kubernetes.yaml") as file:
            documents = list(yaml.safe_load_all(file))
        self.service = next(d for d in documents if d["kind"] == "Service")
        self.pods = [d for d in documents if d["kind"] == "Pod"]
        self.store = self.pods[0]["spec"]["initContainers"][0]

    def test_ports_volumes_and_selectors_fit_together(self):
        labels = self.pods[0]["metadata"]["labels"]
        self.assertLessEqual(self.service["spec"]["selector"].items(), labels.items())
        ports = {port["name"]: port["containerPort"] for port in self.store["ports"]}
        self.assertEqual(self.service["spec"]["ports"][0]["port"], ports["store"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(self.store[probe]["httpGet"]["port"], ports["metrics"])
        for pod in self.pods:
            spec = pod["spec"]
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                self.assertLessEqual(mounted, volumes)
            env = {e["name"]: e.get("value") for e in spec["containers"][0]["env"]}
            name, port = env["RESILIENT_STORE"].split(":")
            self.assertEqual(name, self.service["metadata"]["name"])
            self.assertEqual(int(port), ports["store"])
            self.assertEqual(int(env["WORLD_SIZE"]), len(self.pods))
            token = pathlib.Path(env["RESILIENT_TOKEN_FILE"]).parent
            mounts = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"]]
            self.assertIn(str(token), mounts)

    def test_the_sidecar_starts_answers_its_probes_and_ends(self):
        store_port, metrics_port = free_port(), free_port()
        swap = {
            "$(POD_IP):29400": f"127.0.0.1:{store_port}",
            "$(POD_IP):29401": f"127.0.0.1:{metrics_port}",
            "/var/lib/resilient": str(self.directory / "data"),
            "/etc/resilient/token": str(self.token),
        }
        arguments = []
        for argument in self.store["args"]:
            for old, new in swap.items():
                argument = argument.replace(old, new)
            arguments.append(argument)
        self.assertEqual(self.store["command"], ["resilient-store"])
        process = self.start([BINARY, *arguments])
        probes = {self.store[p]["httpGet"]["path"] for p in ("startupProbe", "readinessProbe")}
        probes.add(self.store["livenessProbe"]["httpGet"]["path"])
        for path in probes:
            url = f"http://127.0.0.1:{metrics_port}{path}"
            self.eventually(lambda url=url: status_of(url) == 200, url)
        process.terminate()
        self.assertEqual(process.wait(PATIENCE), 0)


class Systemd(Example):
    def setUp(self):
        super().setUp()
        self.path = EXAMPLES / "resilient-store.service"
        self.unit = configparser.RawConfigParser(strict=False)
        self.unit.optionxform = str
        self.unit.read(self.path)

    def test_systemd_accepts_the_unit(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("there is no systemd-analyze here")
        copy = self.directory / "resilient-store.service"
        copy.write_text(self.path.read_text().replace("/usr/bin/resilient-store", BINARY))
        done = subprocess.run(
            ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
        )
        about_us = [line for line in done.stderr.splitlines() if "resilient-store" in line]
        self.assertEqual(about_us, [])

    def test_its_command_becomes_ready_keeps_the_watchdog_quiet_and_ends(self):
        service = self.unit["Service"]
        self.assertEqual(service["Type"], "notify")
        variables = {
            "STORE_LISTEN": "127.0.0.1:0",
            "STORE_METRICS": "127.0.0.1:0",
            "STATE_DIRECTORY": str(self.directory / "state"),
            "CREDENTIALS_DIRECTORY": str(self.directory),
        }
        command = re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], service["ExecStart"])
        words = shlex.split(command)
        self.assertEqual(words[0], "/usr/bin/resilient-store")
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(str(self.directory / "notify"))
        manager.settimeout(PATIENCE)
        told = {"NOTIFY_SOCKET": str(self.directory / "notify"), "WATCHDOG_USEC": "200000"}
        process = self.start([BINARY, *words[1:]], env=os.environ | told)

        def hear(text):
            while text not in (heard := manager.recv(4096).decode()):
                pass
            return heard

        hear("READY=1")
        hear("WATCHDOG=1")
        hear("WATCHDOG=1")
        process.terminate()
        hear("STOPPING=1")
        self.assertEqual(process.wait(int(service["TimeoutStopSec"])), 0)


class Slurm(Example):
    def setUp(self):
        super().setUp()
        tools = self.directory / "bin"
        tools.mkdir()
        (tools / "scontrol").write_text(
            '#!/bin/sh\n[ "$*" = "show hostnames nodes" ] && echo localhost\n'
        )
        # Runs what stands behind its options, once for each task.
        (tools / "srun").write_text(
            "#!/bin/bash\n"
            "tasks=$SLURM_NTASKS\n"
            "while [[ $1 == --* ]]; do [[ $1 == --ntasks=1 ]] && tasks=1; shift; done\n"
            '[[ $tasks == 1 ]] && exec "$@"\n'
            "status=0\n"
            "for ((i = 0; i < tasks; i++)); do\n"
            '  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" || status=$?\n'
            "done\n"
            "exit $status\n"
        )
        for tool in tools.iterdir():
            tool.chmod(0o755)
        (tools / "resilient-store").symlink_to(BINARY)
        self.environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_NTASKS": "2",
            "SLURM_SUBMIT_DIR": str(self.directory),
            "STORE_PORT": str(free_port()),
        }

    def run_script(self, *command):
        return subprocess.run(
            ["bash", str(EXAMPLES / "slurm.sh"), *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE,
        )

    def test_ranks_find_the_store_and_it_ends_with_them(self):
        done = self.run_script(
            *("sh", "-c"),
            "resilient-store set rank/$RANK $WORLD_SIZE --timeout 20s && "
            "resilient-store get rank/$RANK && echo : $RESILIENT_JOB",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "2: slurm-4711.0\n" * 2)
        self.assertTrue((self.directory / "store-4711" / "store.db").exists())
        with socket.socket() as probe:
            port = int(self.environment["STORE_PORT"])
            self.assertNotEqual(probe.connect_ex(("127.0.0.1", port)), 0)

    def test_a_killed_store_is_started_again_with_what_it_kept(self):
        self.environment["SLURM_NTASKS"] = "1"
        done = self.run_script(
            *("bash", "-c"),
            "resilient-store set k kept --timeout 20s && "
            "kill -9 $(sed -n 's/.*pid \\([0-9]*\\).*/\\1/p; /^[0-9]*$/p' "
            '"$SLURM_SUBMIT_DIR/store-4711/lock" | head -n 1) && '
            "resilient-store get k --timeout 20s",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "kept")
        self.assertIn("restored the store", done.stderr)


if __name__ == "__main__":
    signal.alarm(240)  # Whatever hangs.
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
