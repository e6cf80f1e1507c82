from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reference.families import random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.sessions import ROOT, Outcome, run_process, tiny_config

SCRIPT = ROOT / "scripts" / "compare_peers.py"

# Speaks the workers' protocol in place of an interpreter, with figures that are known beforehand.
STAND_IN = """
import json, os, signal, sys

SPEED, LOG, DIES = {speed}, {log!r}, {dies}
runs = 0
json.loads(sys.stdin.readline())
print(json.dumps({{"version": "1.0", "settings": "as told", "dtype": "float32"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    ids, count = request["prompt_ids"], request["new_tokens"]
    with open(LOG, "a") as log:
        print(json.dumps({{"name": {name!r}, "prompt_ids": ids, "new_tokens": count}}), file=log)
    if DIES and count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    speed = SPEED * (runs + 1)  # the first run, which is not counted, is the slowest
    runs += 1
    print(json.dumps({{
        "token_ids": [7] * (count - 1) + [len({name!r})],
        "prefill_s": len(ids) / speed,
        "decode_s": (count - 1) / speed,
        "own_prefill_s": None,
        "own_decode_s": (count - 1) / speed / 2,
    }}), flush=True)
"""

Program = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def checkpoint(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a GGUF file."""
    path = tmp_path_factory.mktemp("peers") / "tiny.gguf"
    write_gguf(path, random_weights(tiny_config()), tiny_config())
    return path


@pytest.fixture(scope="module")
def write_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Writes an executable script to take the place of an interpreter."""
    directory = tmp_path_factory.mktemp("programs")

    def write(name: str, text: str) -> Path:
        path = directory / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-ins write what they were asked for."""
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def staged(checkpoint: Path, write_program: Program, log: Path) -> Outcome:
    """Three runs of stand-ins: two that work, one that dies in prefill, one that cannot load, one not installed."""

    def stand_in(name: str, speed: float, dies: bool = False) -> str:
        text = STAND_IN.format(name=name, speed=speed, log=str(log), dies=dies)
        return f"{name}={write_program(name, f'#!{sys.executable}{text}')}"

    crashing = write_program("crashing", "#!/bin/sh\necho out of luck >&2\nexit 7\n")
    bare = write_program("bare", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: no installed package is found
    pythons = (
        stand_in("gptfast", 20.0),
        stand_in("llama.cpp", 10.0),
        stand_in("transformers-compiled", 5.0, dies=True),
        f"transformers={crashing}",
        f"openvino={bare}",
    )
    options = [option for python in pythons for option in ("--python", python)]
    return run_process(
        SCRIPT, "--checkpoint", checkpoint, "--runs", 3, "--new-tokens", 5, "--prefill", "4,6", *options, "--json"
    )


def read_log(log: Path, new_tokens: int) -> list[dict[str, Any]]:
    """The requests for so many new tokens, in order."""
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    return [request for request in requests if request["new_tokens"] == new_tokens]


def test_peers_take_turns(staged: Outcome, log: Path) -> None:
    assert staged.exit_code == 0, staged.stderr
    names = [request["name"] for request in read_log(log, new_tokens=5)]
    assert names == ["gptfast", "llama.cpp", "transformers-compiled"] * 4  # three runs and one that is not counted


def test_peers_get_the_same_prompts_and_no_prefill_repeats_one(staged: Outcome, log: Path) -> None:
    prompts: dict[str, list[tuple[int, ...]]] = {"gptfast": [], "llama.cpp": []}
    for request in read_log(log, new_tokens=1):
        if request["name"] in prompts:
            prompts[request["name"]].append(tuple(request["prompt_ids"]))
    ours, theirs = prompts.values()
    assert ours == theirs
    assert [len(prompt) for prompt in ours] == [4] * 4 + [6] * 4
    assert len(set(ours)) == len(ours)
    vocab_size = tiny_config().vocab_size
    assert all(0 <= token_id < vocab_size for prompt in ours for token_id in prompt)


def test_rates_are_medians_of_the_counted_runs(staged: Outcome) -> None:
    decode = staged.json["peers"]["llama.cpp"]["decode"]
    assert decode["tokens_per_s"]["runs"] == pytest.approx([20.0, 30.0, 40.0])
    assert decode["tokens_per_s"]["median"] == pytest.approx(30.0)
    assert (decode["tokens_per_s"]["least"], decode["tokens_per_s"]["most"]) == pytest.approx((20.0, 40.0))
    assert decode["own_tokens_per_s"]["median"] == pytest.approx(60.0)
    prefill = staged.json["peers"]["llama.cpp"]["prefill"]
    assert prefill["4"]["tokens_per_s"]["median"] == pytest.approx(70.0)
    assert prefill["6"]["tokens_per_s"]["median"] == pytest.approx(110.0)
    assert prefill["4"]["own_tokens_per_s"] is None


def test_ratios_are_ours_to_theirs_within_a_turn(staged: Outcome) -> None:
    peers = staged.json["peers"]
    for name, ratio in (("llama.cpp", 2.0), ("transformers-compiled", 4.0)):
        assert peers[name]["decode"]["ratio"] == pytest.approx({"median": ratio, "p10": ratio, "p90": ratio})
    assert "2.00 (2.00 to 2.00)" in staged.stdout


def test_agreement_counts_the_tokens_before_the_first_that_differs(staged: Outcome) -> None:
    assert staged.json["peers"]["llama.cpp"]["agreeing_tokens"] == 4
    assert "the first 4 of 5 tokens are those of gptfast" in staged.stdout


def test_a_peer_that_is_not_installed_is_listed_with_what_installs_it(staged: Outcome) -> None:
    peer = staged.json["peers"]["openvino"]
    assert (peer["status"], peer["reason"]) == ("missing", "not installed: pip install openvino-genai")
    assert "openvino: not installed: pip install openvino-genai" in staged.stdout


def test_a_peer_that_cannot_load_is_listed_with_its_last_words(staged: Outcome) -> None:
    peer = staged.json["peers"]["transformers"]
    assert (peer["status"], peer["reason"]) == ("failed", "loading failed: out of luck (exit code 7)")


def test_a_peer_that_dies_keeps_the_figures_that_it_had(staged: Outcome) -> None:
    peer = staged.json["peers"]["transformers-compiled"]
    assert (peer["status"], peer["reason"]) == ("failed", "prefill, 4 tokens failed: SIGKILL")
    assert peer["decode"]["tokens_per_s"]["median"] == pytest.approx(15.0)
    assert peer["prefill"]["4"]["tokens_per_s"] is None
    assert peer["prefill"]["6"]["ratio"] is None


def test_the_keys_are_the_same_whatever_is_missing(staged: Outcome) -> None:
    for peer in staged.json["peers"].values():
        assert set(peer) == {"status", "reason", "version", "settings", "decode", "prefill", "agreeing_tokens"}
        assert list(peer["prefill"]) == ["4", "6"]
        for figures in (peer["decode"], *peer["prefill"].values()):
            assert set(figures) == {"tokens_per_s", "own_tokens_per_s", "ratio"}


def test_gptfast_and_transformers_write_the_same_tokens(checkpoint: Path) -> None:
    outcome = run_process(
        SCRIPT,
        *("--checkpoint", checkpoint, "--peers", "transformers", "--dtype", "float32"),
        *("--runs", 2, "--new-tokens", 8, "--prefill", 8, "--threads", 1, "--json"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    fields = outcome.json
    assert (fields["threads"], fields["runs"], fields["prefill_tokens"]) == (1, 2, [8])
    assert list(fields["peers"]) == ["gptfast", "transformers"]
    for name, peer in fields["peers"].items():
        assert peer["status"] == "measured", peer
        assert peer["agreeing_tokens"] == 8
        assert "float32" in peer["settings"]
        for figures in (peer["decode"], peer["prefill"]["8"]):
            assert figures["tokens_per_s"]["least"] > 0
            assert len(figures["tokens_per_s"]["runs"]) == 2
            assert (figures["ratio"]["median"] == 1) == (name == "gptfast")


def test_without_gptfast_nothing_is_compared(checkpoint: Path, write_program: Program) -> None:
    talking = write_program("talking", "#!/bin/sh\necho hello\ncat > /dev/null\n")
    outcome = run_process(SCRIPT, "--checkpoint", checkpoint, "--python", f"gptfast={talking}", "--prefill", 4)
    outcome.assert_refused("gptfast cannot run", "it answered 'hello', which is not JSON")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--peers", "llama"), "'llama' is not a peer"),
        (("--python", "llama.cpp=/no/such/python"), "names no program"),
        (("--prefill", "64;512"), "not a list of numbers"),
        (("--prefill", "2304"), "context is 2304"),
        (("--random", "llama-3.2-1b"), "give one"),
    ],
)
def test_bad_input_is_one_line(checkpoint: Path, options: tuple[str, ...], words: str) -> None:
    outcome = run_process(SCRIPT, "--checkpoint", checkpoint, *options)
    outcome.assert_refused(words)


def test_what_a_library_prints_does_not_disturb_a_worker(tmp_path: Path) -> None:
    worker = tmp_path / "noisy.py"
    worker.write_text(
        textwrap.dedent(
            """
            import os
            from peers.protocol import PeerFacts, Run, serve

            class Noisy:
                def __init__(self, request):
                    os.write(1, b"loading\\n")
                    self.facts = PeerFacts(version=str(request.threads), settings=repr(os.read(0, 1)))

                def generate(self, prompt_ids, new_tokens):
                    print("generating", flush=True)
                    return Run(list(prompt_ids) * new_tokens, 1.0, 2.0)

            serve("noisy", Noisy)
            """
        )
    )
    load = {"checkpoint": "x", "threads": 3, "context": 4, "dtype": None, "weights": "stored", "activations": None}
    requests = [json.dumps(load), json.dumps({"prompt_ids": [5], "new_tokens": 2})]
    outcome = run_process(worker, stdin="\n".join(requests), PYTHONPATH=str(ROOT / "scripts"))
    facts, run = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert facts == {"version": "3", "settings": "b''", "dtype": None}
    assert run["token_ids"] == [5, 5]
    assert outcome.stderr.split() == ["loading", "generating"]
