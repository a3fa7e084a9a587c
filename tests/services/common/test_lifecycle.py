from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from services.common.lifecycle import (
    Deadline,
    DeadlineExceeded,
    free_port,
    port_is_free,
    process_is_alive,
    wait_until,
    write_bytes,
    write_json,
)


def spawn(script, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_wait_ends_with_its_predicate_its_deadline_or_a_stop():
    turns = iter([False, False, True])
    assert wait_until(lambda: next(turns), 10, "it", poll_seconds=0)
    with pytest.raises(DeadlineExceeded, match=r"Gave up waiting for the moon after 0.01 s\."):
        wait_until(lambda: False, 0.01, "the moon")
    assert wait_until(lambda: True, 0, "what is there already")
    stop = threading.Event()
    stop.set()
    assert wait_until(lambda: False, 60, "it", stop=stop) is False


def test_a_deadline_counts_down_to_zero():
    assert Deadline(0).expired
    assert Deadline(0).remaining == 0
    assert 0 < Deadline(60).remaining <= 60
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="0 or more"):
            Deadline(wrong)


STOPPABLE = """
    import threading
    from services.common.lifecycle import stop_on_signals
    stop = threading.Event()
    stop_on_signals(stop)
    print("ready", flush=True)
    stop.wait(60)
    print("stopping", flush=True)
    threading.Event().wait(float(__import__("sys").argv[1]))
    print("done", flush=True)
"""


def test_the_first_signal_stops_and_the_second_ends():
    process = spawn(STOPPABLE, "0")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("stopping\ndone\n", 0)
    assert "SIGTERM: finishing" in err

    process = spawn(STOPPABLE, "60")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 128 + signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's own")
def test_a_child_dies_with_its_killed_parent():
    parent = spawn("""
        import subprocess, sys, threading
        from services.common.lifecycle import child_dies_with_me
        child = subprocess.Popen(["sleep", "60"], preexec_fn=child_dies_with_me(), stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        print(child.pid, flush=True)
        threading.Event().wait(60)
    """)
    child = int(parent.stdout.readline())
    assert process_is_alive(child)
    parent.kill()
    parent.communicate(timeout=30)
    wait_until(lambda: not process_is_alive(child), 10, "the child's death")


def test_zombies_and_strangers_are_not_alive():
    process = subprocess.Popen(["true"])
    wait_until(lambda: not process_is_alive(process.pid), 10, "the end of a process that nobody has waited for")
    process.wait()
    assert process_is_alive(os.getpid())


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "f"
    write_bytes(path, b"old", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_json(path, {"b": 1, "a": [1.5]})
    assert json.loads(path.read_text()) == {"a": [1.5], "b": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": [1.5], "b": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_ports_are_free_until_they_are_taken():
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)
