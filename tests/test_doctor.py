"""`etude doctor`: probes that really probe, lines that say how to enable what is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema
import pytest

from etude import doctor
from etude.doctor import Probe, Status

SCHEMA = json.loads((Path(__file__).resolve().parents[1] / "docs" / "schemas" / "doctor.json").read_text())
HERE = {"python", "torch", "memory", "disk", "gpu", "vllm", "git", "ripgrep"}
NAMES = HERE | {"sandbox", "sandbox-landlock", "userns", "overlayfs", "seccomp", "landlock", "cgroups", "bubblewrap", "docker", "kvm"}


@pytest.fixture(scope="module")
def output() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "etude.cli", "doctor", "--json"], capture_output=True, text=True, check=False)


def test_the_json_is_valid_and_complete(output):
    report = json.loads(output.stdout.splitlines()[-1])
    jsonschema.validate(report, SCHEMA)
    assert {p["name"] for p in report["probes"]} == NAMES
    assert sum(report["counts"].values()) == len(NAMES)
    required_missing = [p for p in report["probes"] if p["required"] and p["status"] == "no"]
    assert output.returncode == (1 if required_missing else 0)
    by_name = {p["name"]: p for p in report["probes"]}
    assert by_name["python"]["status"] == by_name["torch"]["status"] == "ok"
    for p in report["probes"]:
        if p["status"] != "ok":
            assert p["how"], f"{p['name']} does not say how to enable it"


def test_a_broken_report_is_not_valid(output):
    report = json.loads(output.stdout.splitlines()[-1])
    check = jsonschema.Draft202012Validator(SCHEMA)
    assert not check.is_valid({**report, "probes": []})
    assert not check.is_valid({**report, "probes": [{**report["probes"][0], "status": "maybe"}]})
    assert not check.is_valid({k: v for k, v in report.items() if k != "counts"})


def test_the_text_tells_what_it_would_give_and_how():
    lines = doctor.text(
        [
            Probe(name="a", status=Status.OK, found="1.0", enables="x"),
            Probe(name="long name", status=Status.NO, found="not here", enables="fast grep", how="apt install it"),
        ]
    ).splitlines()
    assert lines[0].split() == ["ok", "a", "1.0"]
    assert lines[1].split()[:1] == ["no"]
    assert lines[2].strip() == "would give: fast grep"
    assert lines[3].strip() == "to enable:  apt install it"


def test_doctor_leaves_torch_and_its_own_process_alone():
    code = (
        "import sys, os\nfrom etude import doctor\nbefore = open('/proc/self/status').read().count('NoNewPrivs:\\t0')\n"
        "doctor.probe_all()\nassert 'torch' not in sys.modules\n"
        "assert open('/proc/self/status').read().count('NoNewPrivs:\\t0') == before\nprint('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n"


def children_of_this_machine(name: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", doctor.__file__, name]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux's unshare to compare with")
def test_user_namespaces_agree_with_util_linux():
    theirs = subprocess.run(["unshare", "--user", "--mount", "--pid", "--ipc", "--net", "true"], capture_output=True, check=False)
    ours = children_of_this_machine("userns")
    assert (ours.returncode == 0) == (theirs.returncode == 0), ours.stderr


def test_a_probe_leaves_no_mount_and_no_folder_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = Path("/proc/self/mounts").read_text()
    done = children_of_this_machine("overlay")
    assert done.returncode == 0 or done.stderr
    assert Path("/proc/self/mounts").read_text() == before
    assert list(tmp_path.iterdir()) == []


def test_seccomp_is_what_the_kernel_says_it_is():
    done = children_of_this_machine("seccomp")
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if done.returncode != 0:
        assert done.stderr.strip()
    else:
        assert "errno" in actions.read_text()


def test_landlock_gives_a_number_or_a_reason():
    done = children_of_this_machine("landlock")
    if done.returncode == 0:
        assert int(done.stdout) >= 1
    else:
        assert done.stderr.startswith("landlock_create_ruleset: ")


def test_a_refusal_says_why_and_how():
    refused = (1, "", "Traceback\nunshare(CLONE_NEWUSER): Operation not permitted")
    probe = doctor.probe_userns(refused)
    assert probe.status is Status.NO
    assert probe.found == "unshare(CLONE_NEWUSER): Operation not permitted"
    assert probe.how
    assert doctor.probe_overlay(refused).status is Status.NO
    assert doctor.probe_seccomp((None, "", "no answer in time")).found == "no answer in time"
    assert doctor.probe_landlock((0, "3", "")).status is Status.PARTIAL
    assert doctor.probe_landlock((0, "7", "")) == Probe(
        name="landlock", status=Status.OK, found="ABI 7", enables=doctor.probe_landlock((0, "7", "")).enables
    )


@pytest.mark.parametrize("backend", ["namespace", "landlock"])
def test_a_sandbox_works_when_its_doors_were_seen_shut(backend):
    works = doctor.probe_sandbox(backend, (0, json.dumps({"works": True, "facts": {}}), ""))
    assert (works.status, works.found) == (Status.OK, f"backend `{backend}` works here")
    said = {"works": False, "failed_step": "user namespace", "error": "Operation not permitted", "remedy": "sysctl ..."}
    lacks = doctor.probe_sandbox(backend, (0, json.dumps(said), ""))
    assert lacks.status is Status.NO
    assert "user namespace: Operation not permitted" in lacks.found
    assert lacks.how == "sysctl ..."
    for answer in ((None, "", "no answer in time"), (1, "", "Traceback"), (0, "nonsense", "")):
        assert doctor.probe_sandbox(backend, answer).status is Status.NO


@pytest.mark.parametrize(
    "flags, module, kind", [({"svm"}, True, "svm"), ({"vmx"}, False, "vmx"), ({"hypervisor"}, True, "pvm"), (set(), False, "none")]
)
def test_virtualisation_is_read_from_flags_and_modules(tmp_path, flags, module, kind):
    if module:
        (tmp_path / "kvm_pvm").mkdir()
    assert doctor.virtualisation(flags, tmp_path) == kind


def test_a_device_node_alone_is_no_kvm():
    if not {"svm", "vmx"} & doctor.cpu_flags():
        assert doctor.probe_kvm().status is not Status.OK


def serve_docker(path: Path, answer: bytes) -> threading.Thread:
    """A daemon that answers one request on a socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def answer_one() -> None:
        with server, server.accept()[0] as connection:
            assert connection.recv(4096).startswith(b"GET /version ")
            connection.sendall(answer)

    thread = threading.Thread(target=answer_one)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "body, status", [(b'{"Version": "27.1"}', Status.OK), (b"[]", Status.NO), (b"{}", Status.NO), (b"oops", Status.NO), (b"", Status.NO)]
)
def test_docker_is_there_when_its_socket_answers(tmp_path, body, status):
    path = tmp_path / "docker.sock"
    thread = serve_docker(path, b"HTTP/1.0 200 OK\r\n\r\n" + body)
    probe = doctor.probe_docker([str(tmp_path / "absent.sock"), str(path)])
    thread.join()
    assert probe.status is status
    assert str(path) in probe.found
    assert ("27.1" in probe.found) == (status is Status.OK)


def test_the_docker_host_of_the_environment_is_asked_first(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///tmp/mine.sock")
    assert doctor.docker_sockets()[:2] == ["/tmp/mine.sock", "/var/run/docker.sock"]
    monkeypatch.setenv("DOCKER_HOST", "tcp://somewhere:2375")
    assert doctor.docker_sockets()[0] == "/var/run/docker.sock"


def test_a_socket_nobody_listens_on_is_no_docker(tmp_path):
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    probe = doctor.probe_docker([str(path)])
    assert probe.status is Status.NO
    assert "is there but does not answer" in probe.found
    assert doctor.probe_docker([]).found == "no socket"


def test_torch_that_does_not_load_is_no_torch(tmp_path):
    """Both programs that load torch fail on a torch whose library is cut short."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch._C import *\n")
    (package / "_C.so").write_bytes(b"\x7fELF cut short")
    for code in (doctor.TORCH_LIBRARY, doctor.TORCH_WHOLE):
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, check=False)
        assert done.returncode != 0
        assert "torch" in done.stderr


def test_the_quick_look_at_torch_says_what_torch_says():
    code = "import torch; print(torch.get_num_threads(), torch.cuda.device_count())"
    quick, whole = (
        subprocess.run([sys.executable, "-P", "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (doctor.TORCH_LIBRARY, code)
    )
    assert quick == whole


def test_disk_and_memory_are_measured(tmp_path):
    free = float(doctor.probe_disk(tmp_path).found.split()[0])
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1.0)
    available, total, limiter = doctor.memory_bytes()
    assert 0 < available <= total
    assert limiter in ("machine", "cgroup")
    assert doctor.probe_memory().found.endswith(f"of {total / 2**30:.1f} GiB ({limiter})")


def test_a_child_that_hangs_is_reported_and_ended():
    child = doctor.Child([sys.executable, "-c", "import time; time.sleep(600)"])
    assert child.result(0.2) == (None, "", "no answer in time")
    assert child.process is not None
    assert child.process.returncode is not None
    missing = doctor.Child(["no-such-program-anywhere"]).result()
    assert missing[0] is None
    assert "No such file" in missing[2]


def test_a_gpu_beside_a_cpu_torch_is_partial():
    card = (0, "NVIDIA H200, 143771 MiB, 570.1", "")
    probe = doctor.probe_gpu(card)
    assert probe.status in (Status.OK, Status.PARTIAL)
    assert "H200" in probe.found
    assert doctor.probe_gpu((9, "", "driver/library version mismatch")).found == "nvidia-smi failed: driver/library version mismatch"
    assert doctor.probe_gpu((None, "", "No such file")).found == "no NVIDIA GPU"


def test_required_and_missing_is_exit_status_one(output):
    report = json.loads(output.stdout.splitlines()[-1])
    assert [p["name"] for p in report["probes"] if p["required"]] == ["python", "torch", "memory", "disk"]
    assert dataclasses.is_dataclass(Probe)
