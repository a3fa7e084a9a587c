"""Verdicts, and the pool of processes that gives them: time limits, crashes, errors, cancellation."""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from services.common.lifecycle import process_is_alive
from services.config import RewardConfig
from services.rollout.grading import Grade, GradingPool
from services.rollout.verifiers import MathVerifier, exact, resolve
from specroll_core.contracts import RewardStatus

BOX = "\\boxed"

# completion, reference, declared verdict
VERDICTS = [
    # equal, and often judged different
    ("pi/2", r"\dfrac{\pi}{2}", True),
    (r"\dfrac{\pi}{2}", "pi/2", True),
    (r"The angle is \frac{\pi}{2}.", r"\frac{\pi}{2}", True),
    (r"The answer is $\pi/2$", r"\dfrac{\pi}{2}", True),
    (r"$\sqrt{1/n}$", r"\frac{1}{\sqrt{n}}", True),
    (r"$\frac{1}{\sqrt{n}}$", r"\sqrt{1/n}", True),
    ("2*sqrt(3)", r"2\sqrt{3}", True),
    (r"\frac12", "1/2", True),
    ("0.5", "1/2", True),
    ("1/2", "0.5", True),
    ("0.333333", r"\frac{1}{3}", True),
    ("0.033333", "1/30", True),
    ("x = 3", "3", True),
    ("3", "x=3", True),
    ("$1+x$", "x+1", True),
    (r"$\{2,1\}$", "{1,2}", True),
    ("$(1,2)$", "(1,2)", True),
    ("Monday", "Monday", True),
    # different, and sometimes judged equal
    ("$1+1/e$", "1-1/e", False),
    (r"$1+\frac{1}{e}$", r"1-\frac{1}{e}", False),
    (r"$\frac{1}{10^{21}}$", r"\frac{1}{10^{20}}", False),
    (r"$\frac{2}{10000000}$", r"\frac{1}{10000000}", False),
    ("0.0000002", "0.0000001", False),
    ("0.0000001", "0", False),
    ("0", "0.0000001", False),
    ("0.33", r"\frac{1}{3}", False),
    ("$(2,1)$", "(1,2)", False),
    ("$x$", "|x|", False),
    ("$x+2$", "x+1", False),
    ("-12", "12", False),
    ("12", "-12", False),
    ("3pi/2", "pi/2", False),
    # the final answer of a longer text
    ("The answer is 42 because 40 + 2 = 42, not 7.", "42", True),
    ("3 + 4 = 8, no: 3 + 4 = 7.", "7", True),
    ("There are 12 eggs.", "12", True),
    ("41 42", "42", True),
    ("42 41", "42", False),
    (f"{BOX}{{41}} no, {BOX}{{42}}", "42", True),
    (f"{BOX}{{41}} hence 42", "42", False),
    (f"so the answer is {BOX}{{42}}.", "42", True),
    (f"{BOX}{{-\\frac{{1}}{{2}}}}", "-1/2", True),
    (f"{BOX}{{12\\text{{ eggs}}}}", "12", True),
    ("", "42", False),
    ("seven", "7", False),
    # cut off in the middle
    (f"so the answer is {BOX}{{42", "42", False),
    (f"there are 42 eggs, {BOX}{{4", "42", False),
    (f"{BOX}{{42}} so {BOX}{{4", "42", False),
    # ways to write a number
    ("1,000", "1000", True),
    ("1000", "1,000", True),
    ("$12", "12", True),
    ("12.0", "12", True),
    ("007", "7", True),
    ("**7**", "7", True),
    ("= 7.", "7", True),
    ("5 - 10 = -5", "-5", True),
    (r"$1.2\times 10^3$", "1200", True),
    ("9%", "9", True),
    ("0.09", "9%", True),
    # an expression that repeats the question is no answer to it
    ("3 + 4", "7", False),
    ("$3+4$", "7", False),
    ("6/2", "3", False),
    (r"$\frac{6}{2}$", "3", False),
    ("$2^3$", "8", False),
    ("1.42 + 5.72", "7.14", False),
]


@pytest.fixture(scope="module")
def math() -> MathVerifier:
    return MathVerifier()


@pytest.mark.parametrize(("completion", "reference", "equal"), VERDICTS)
def test_math_gives_the_declared_verdict(math, completion, reference, equal):
    assert math(completion, reference) == float(equal)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(range(-9, 10, 3), range(0, 12, 5))))
def test_math_and_exact_agree_with_arithmetic_on_sums(math, a, b):
    for offset in (-1, 0, 1):
        text = f"{a} + {b} = {a + b + offset}"
        assert math(text, str(a + b)) == exact(text, str(a + b)) == float(offset == 0)


def test_a_reference_that_cannot_be_read_is_an_error_and_not_a_wrong_answer(math):
    with pytest.raises(ValueError, match="cannot be read"):
        math("42", "")


@pytest.mark.parametrize(
    ("completion", "reference", "equal"),
    [
        ("It is 1,234.50", "1234.5", True),
        ("5-3", "3", True),
        ("it is -3", "-3", True),
        ("(2-3)", "3", True),
        ("no number", "3", False),
        ("42 41", "42", False),
        (" red ", "red", True),
        ("Red", "red", False),
        ("nan", "nan", True),
    ],
)
def test_exact_compares_the_last_number_or_the_text(completion, reference, equal):
    assert exact(completion, reference) == float(equal)


USER_MODULE = """
import os, sys, time
calls = 0

def half(completion, answer):
    print("noise on stdout")
    return 0.5

def fails(completion, answer):
    raise KeyError("judge is down")

def fails_once(completion, answer):
    global calls
    calls += 1
    if calls == 1:
        raise ConnectionError("judge is down")
    return 1.0

def nan(completion, answer):
    return float("nan")

def nothing(completion, answer):
    return None

def dies(completion, answer):
    os._exit(7)

def dies_once(completion, answer):
    if os.path.exists(answer):
        return 1.0
    open(answer, "w").close()
    os._exit(7)

def hangs(completion, answer):
    if completion == "hang":
        while True:
            time.sleep(60)
    return 1.0

def secret(completion, answer):
    return float(answer in os.environ)

def one(completion):
    return 1.0

async def later(completion, answer):
    return 1.0

number = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch) -> str:
    """The name of an importable module, in this process and in the workers."""
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return name


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("maths", "must be 'math', 'exact' or 'package.module:function'"),
        ("no.such.module:function", "cannot be imported: ModuleNotFoundError"),
        ("{module}:absent", "cannot be imported: AttributeError"),
        ("{module}:one", "must be a function of (completion, answer)"),
        ("{module}:number", "must be a function of (completion, answer)"),
        ("{module}:later", "must be a plain function"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_one_sentence(user_module, verifier, words):
    name = verifier.format(module=user_module)
    with pytest.raises(ValueError, match=r"reward\.verifier") as caught:
        resolve(name)
    assert words in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def run(config: RewardConfig, *jobs: tuple[str, str]) -> tuple[list[Grade], GradingPool]:
    async def grade_all() -> tuple[list[Grade], GradingPool]:
        pool = GradingPool(config)
        await pool.start()
        try:
            return await asyncio.gather(*(pool.grade(*job) for job in jobs)), pool
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(grade_all(), timeout=100))


def test_known_right_answers_score_one_in_the_pool():
    jobs = [(f"{i} + 3 = {i + 3}", str(i + 3)) for i in range(40)] + [
        (f"${i}+3={i + 4}$", str(i + 3)) for i in range(8)
    ]
    grades, pool = run(RewardConfig(workers=2), *jobs)
    assert [g.reward for g in grades] == [1.0] * 40 + [0.0] * 8
    assert pool.counts == {RewardStatus.OK: 48, RewardStatus.TIMEOUT: 0, RewardStatus.ERROR: 0}
    assert pool.restarts == 0


def test_a_pathological_expression_ends_at_the_limit_and_others_are_graded():
    tower = f"{BOX}{{10000000!}}"  # seventy million digits
    grades, pool = run(
        RewardConfig(workers=2, timeout_seconds=1.0),
        (tower, "7^{7^{7^{7}}}"),
        *[(str(i), str(i)) for i in range(6)],
        (f"${'(' * 3000}1{')' * 3000}$", "x"),
        ("7", "7"),
    )
    assert grades[0].status is RewardStatus.TIMEOUT
    assert "1 s" in grades[0].detail
    assert [g.status for g in grades[1:7]] == [RewardStatus.OK] * 6
    assert [g.reward for g in grades[1:7]] == [1.0] * 6
    assert grades[7].status in (RewardStatus.OK, RewardStatus.TIMEOUT)
    assert grades[7].reward == 0.0
    assert grades[8] == Grade(1.0, RewardStatus.OK)
    assert pool.restarts == pool.counts[RewardStatus.TIMEOUT] >= 1


def test_a_hang_costs_one_sample_and_its_worker_is_replaced(user_module):
    config = RewardConfig(verifier=f"{user_module}:hangs", workers=1, timeout_seconds=0.5)
    grades, pool = run(config, ("a", ""), ("hang", ""), ("b", ""), ("c", ""))
    assert [g.status for g in grades] == [RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.OK, RewardStatus.OK]
    assert pool.restarts == 1


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("fails", "KeyError: 'judge is down'"),
        ("nan", "not finite"),
        ("nothing", "TypeError"),
        ("dies", "ended with status 7"),
    ],
)
def test_a_failure_is_an_error_and_never_a_reward(user_module, function, detail):
    grades, pool = run(RewardConfig(verifier=f"{user_module}:{function}"), ("a", "b"))
    assert grades[0].status is RewardStatus.ERROR
    assert detail in grades[0].detail
    assert pool.counts == {RewardStatus.OK: 0, RewardStatus.TIMEOUT: 0, RewardStatus.ERROR: 1}


@pytest.mark.parametrize("function", ["fails_once", "dies_once"])
def test_a_failure_that_passes_is_retried(user_module, function, tmp_path):
    job = ("a", str(tmp_path / "mark"))
    (grade,), pool = run(RewardConfig(verifier=f"{user_module}:{function}", retries=1), job)
    assert grade == Grade(1.0, RewardStatus.OK)
    assert pool.counts[RewardStatus.ERROR] == 0


def test_without_retries_a_failure_is_final(user_module):
    (grade,), _ = run(RewardConfig(verifier=f"{user_module}:fails_once", retries=0), ("a", "b"))
    assert grade.status is RewardStatus.ERROR


def test_what_a_verifier_prints_does_not_disturb_the_replies(user_module):
    grades, _ = run(RewardConfig(verifier=f"{user_module}:half"), ("a", "b"), ("c\n\u2028\x00d", "é"))
    assert grades == [Grade(0.5, RewardStatus.OK)] * 2


def test_workers_do_not_see_the_secrets_of_the_run(user_module, monkeypatch):
    monkeypatch.setenv("SPECROLL_GRPC_TOKEN", "hunter2")
    grades, _ = run(RewardConfig(verifier=f"{user_module}:secret"), ("", "SPECROLL_GRPC_TOKEN"), ("", "PATH"))
    assert [g.reward for g in grades] == [0.0, 1.0]


def test_start_fails_with_the_sentence_of_the_verifier():
    async def start() -> None:
        await GradingPool(RewardConfig(verifier="no.such:function", workers=2)).start()

    with pytest.raises(ValueError, match=r"reward\.verifier = 'no\.such:function' cannot be imported"):
        asyncio.run(asyncio.wait_for(start(), timeout=60))


def test_cancelled_calls_leave_the_pool_usable(user_module):
    async def scenario() -> tuple[list[Grade], GradingPool]:
        pool = GradingPool(RewardConfig(verifier=f"{user_module}:hangs", workers=1, timeout_seconds=1.0))
        await pool.start()
        try:
            calls = [asyncio.create_task(pool.grade("hang" if i == 0 else "x", "")) for i in range(8)]
            await asyncio.sleep(0)  # lets every call reach the queue: one may be running, the others wait
            for call in calls:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            return [await pool.grade("x", "") for _ in range(3)], pool
        finally:
            await pool.close()

    grades, _ = asyncio.run(asyncio.wait_for(scenario(), timeout=60))
    assert grades == [Grade(1.0, RewardStatus.OK)] * 3


def test_close_cancels_what_waits_and_ends_every_process(user_module):
    async def scenario() -> None:
        pool = GradingPool(RewardConfig(verifier=f"{user_module}:hangs", workers=2, timeout_seconds=60.0))
        await pool.start()
        children = await list_children()
        calls = [asyncio.create_task(pool.grade("hang", "")) for _ in range(8)]
        await asyncio.sleep(0)
        await pool.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert len(children) == 2
        assert not any(process_is_alive(pid) for pid in children)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


async def list_children() -> list[int]:
    """Process ids of the grading workers that this process started."""
    listing = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [pid for pid in map(int, listing.split()) if b"grading_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_workers_die_with_a_pool_that_is_killed(user_module):
    """Even one that is busy with a verifier that never returns, and so never sees its stdin close."""
    script = f"""
import asyncio, os, signal
from pathlib import Path
from services.config import RewardConfig
from services.rollout.grading import GradingPool

async def main():
    pool = GradingPool(RewardConfig(verifier="{user_module}:hangs", workers=1, timeout_seconds=600.0))
    await pool.start()
    call = asyncio.create_task(pool.grade("hang", ""))
    await asyncio.sleep(0)
    pid = os.getpid()
    print(Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text(), flush=True)
    os.kill(pid, signal.SIGKILL)

asyncio.run(main())
"""

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        workers = [int(pid) for pid in output.split()]
        assert workers
        while any(process_is_alive(pid) for pid in workers):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_the_worker_speaks_json_lines_and_ends_with_its_input():
    async def scenario() -> tuple[list[dict], int | None]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout.grading_worker", "exact", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate(b'{"completion": "it is 7", "answer": "7"}\n')
        return [json.loads(line) for line in output.splitlines()], process.returncode

    replies, status = asyncio.run(asyncio.wait_for(scenario(), timeout=60))
    assert replies == [{"ready": True}, {"reward": 1.0}]
    assert status == 0
