"""Rewards run in processes of their own: their order, their errors, and what the bare command pays."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from recipes.common.reinforcement import parses
from recipes.common.reinforcement.rewards import Answered, RewardFlags, Rewards
from recipes.common.runtime import Stopped, UserError
from tests.conftest import ROOT

pytestmark = pytest.mark.promise("rewards")

SOURCE = """
import time

print("at import")

def length(prompt, completion, row):
    print("noise on stdout")
    return len(completion) + row["more"]

def of_lists(prompts, completions, rows):
    return [len(p) for p in prompts]

def slow(prompt, completion, row):
    time.sleep(60 if completion == "slow" else 0)
    return 1

def fails(prompt, completion, row):
    if completion == "nan":
        return float("nan")
    return 1 / len(completion)

def dies(prompt, completion, row):
    if completion == "exit":
        import os
        os._exit(3)
    return 1
"""


@pytest.fixture
def rewards(tmp_path):
    """Returns a function that makes Rewards of functions of the file, and closes them at the end."""
    (tmp_path / "functions.py").write_text(SOURCE)
    made = []

    def make(*names: str, **flags) -> Rewards:
        named = tuple(f"{tmp_path / 'functions.py'}:{name}" for name in names)
        made.append(Rewards(RewardFlags(reward=named, **flags)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answers(*completions: str) -> list[Answered]:
    return [
        Answered("p" * n, text, {"more": 10 * n}, f"row {n}") for n, text in enumerate(completions)
    ]


def test_each_answer_gets_its_reward(rewards):
    both = rewards("length", "of_lists", reward_weights="1,-0.5")
    found = both(answers("a", "bbb", "", "dd", "e"))
    np.testing.assert_array_equal(found, [[1, 0], [13, 1], [20, 2], [32, 3], [41, 4]])
    assert both.names == ["length", "of_lists"]
    assert both.weights == [1, -0.5]


@pytest.mark.parametrize(
    ("function", "bad", "reason"),
    [
        ("fails", "", "ZeroDivisionError"),
        ("fails", "nan", "the reward is nan"),
        ("slow", "slow", "more than 0.3 s"),
        ("dies", "exit", "its process ended"),
    ],
)
def test_a_failing_reward_names_its_row_or_counts_as_0(function, bad, reason, rewards):
    asked = answers("good", bad, "also good")
    begin = time.monotonic()
    with pytest.raises(Stopped) as stopped:
        rewards(function, reward_seconds=0.3)(asked)
    assert "row 1" in str(stopped.value)
    assert reason in str(stopped.value)
    lenient = rewards(function, reward_seconds=0.3, reward_errors="zero")
    found = lenient(asked)
    assert found[1, 0] == 0
    assert (found[[0, 2], 0] > 0).all(), "the process that was killed is there again"
    assert lenient.failed == 1
    assert time.monotonic() - begin < 30


def test_no_process_is_left(rewards):
    one = rewards("length")
    pids = [worker._process.pid for workers in one._workers for worker in workers]
    one.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ENDLESS = """
import os, pathlib, re, subprocess

def note(pid):
    with pathlib.Path(__file__).with_name("pids").open("a") as file:
        file.write(f"{pid}\\n")

def python(prompts, completions, rows):
    note(subprocess.Popen(["sleep", "600"]).pid)
    note(os.getpid())
    while True:
        pass

def interpreter(prompts, completions, rows):
    note(0)
    note(os.getpid())
    re.match("(a+)+$", "a" * 64 + "b")
"""
RUN = """
import sys
from recipes.common.reinforcement.rewards import Answered, RewardFlags, Rewards
Rewards(RewardFlags(reward=(sys.argv[1],), reward_seconds=float(sys.argv[2])))([Answered("", "", {}, "")])
"""


def is_running(pid: int) -> bool:
    """Whether a process computes: one that nobody has waited for yet does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize(("function", "seconds"), [("python", 600), ("interpreter", 2)])
def test_an_endless_reward_ends_with_its_run(function, seconds, tmp_path):
    """With the processes that it has started; if it keeps the interpreter to itself, at its limit."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", RUN, f"{tmp_path / 'endless.py'}:{function}", str(seconds)]
    run = subprocess.Popen(command, cwd=ROOT)
    pids = tmp_path / "pids"
    wait_for(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    noted = [int(line) for line in pids.read_text().split() if line != "0"]
    wait_for(lambda: not any(map(is_running, noted)))


def wait_for(condition, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


MISTAKES = {
    "functions.py": "is not FILE.py:FUNCTION",
    "absent.py:reward": "there is no file absent.py",
    "{}/functions.py:absent": "can't be used (KeyError: 'absent')",
    "{}/broken.py:reward": "can't be used (SyntaxError",
}


@pytest.mark.parametrize("named", MISTAKES)
def test_a_mistake_is_one_line(named, tmp_path):
    (tmp_path / "functions.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(UserError) as error:
        Rewards(RewardFlags(reward=(named.format(tmp_path),)))
    assert MISTAKES[named] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weights", ["1,2,3", "a", "nan,1"])
def test_weights_fit_the_rewards(weights):
    with pytest.raises(UserError, match="--reward_weights"):
        _ = RewardFlags(reward=("a.py:f", "b.py:g"), reward_weights=weights).weights


# ---- the reward of the bare command --------------------------------------------------------------

PROMPT = "def area(width, height):\n    "
PAID = {
    "return width * height\n": 1,
    "size = width * height\n    return size\nprint(ar": 1,  # the limit cuts the last line off
    "if width:\n        return height\n": 1,
    "return width * height": 0,  # not a whole line
    "return width *\n": 0,
    "if width:\n": 0,
    "": 0,
    "\n": 0,
    "\n\n\n": 0,
    "pass\n": 0,
    "width\n": 0,
    '"""Text."""\n': 0,
    "# a comment\n    pass\n": 0,
    "return width\n\n\n": 0,
    "x = 1\n    x = 1\n    x = 1\n": 0,
    "x = 1\n    pass\n    pass\n": 0,
    "x = '\x00'\n": 0,
}


QUESTIONS = (parses.parses, parses.uses_parameter, parses.names_known, parses.two_kinds)


@pytest.mark.parametrize("completion", PAID)
def test_only_python_that_does_something_is_paid(completion):
    assert parses.parses(PROMPT, completion, {}) == PAID[completion]
    if not PAID[completion]:
        assert [question(PROMPT, completion, {}) for question in QUESTIONS] == [0, 0, 0, 0]


# Uses a parameter, the share of names that it knows, has two kinds of statements.
ANSWERED = {
    "return width * height\n": (1, 1, 0),
    "self.get_name()\n": (0, 0, 0),  # the shortest way to a whole line
    "return size\n": (0, 0, 0),
    "size = width\n    return size\n": (1, 1, 1),
    "for i in range(3):\n        print(i)\n": (0, 1, 1),
    "for i in range(3):\n        print(j)\n": (0, 2 / 3, 1),
    "width = 3\n    return width\n": (1, 1, 1),
    "width = 3\n": (0, 0, 0),  # reads none
    "size = width + height + depth\n": (1, 2 / 3, 0),
    "import os as system\n    system.exit(height)\n": (1, 1, 1),
    "try:\n        width()\n    except OSError as error:\n        raise error\n": (1, 1, 1),
    "def inner(x):\n        return x\n    inner(1)\n": (0, 1, 1),
    "return 1\nprint(width)\n": (0, 1, 1),  # after the function
}


@pytest.mark.parametrize("completion", ANSWERED)
def test_each_question_is_answered(completion):
    found = tuple(question(PROMPT, completion, {}) for question in QUESTIONS[1:])
    assert found == ANSWERED[completion]


def test_a_function_without_parameters_has_none_to_use():
    assert parses.uses_parameter("def now():\n    ", "return 1\n", {}) == 1
    assert parses.names_known("def now(zone: Zone = HERE):\n    ", "return zone\n", {}) == 1
    assert parses.uses_parameter("x = 1\n", "y = x\n", {}) == 1


def test_the_bare_command_pays_a_quarter_for_each_question():
    flags = RewardFlags()
    assert flags.weights == [0.25] * 4
    assert RewardFlags(reward_weights="1,0,0,0").weights == [1, 0, 0, 0]
