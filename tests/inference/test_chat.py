"""A conversation through a pipe: what the model sees of it, its commands, and how it ends."""

import io

import pytest

from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, replace
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.inference import chat
from jaxpar.inference.chat import Dialogue, template_of
from jaxpar.inference.generation import generate
from jaxpar.inference.load import LoadedModel, load
from jaxpar.inference.options import ChatOptions, Sampling
from tests.checkpoint.test_averaging import write_run


@pytest.fixture
def model() -> LoadedModel:
    """Without weights: `answers` stands for its answers."""
    cfg = replace(Config(), **{"data.seq_len": 64})
    return LoadedModel(cfg, None, None, ByteTokenizer(), (), None)


@pytest.fixture
def answers(monkeypatch, model):
    """Answers "héé", byte by byte. Returns the prompts that were seen, as texts."""
    seen = []

    def made(weights, cfg, mesh, prompts, how, *, max_tokens, vocab_size, stop):
        seen.append(model.tokenizer.decode(prompts[0]))
        yield [[]]
        for byte in "héé".encode():
            yield [[byte]]

    monkeypatch.setattr(chat, "generate", made)
    monkeypatch.setattr(chat, "load", lambda *_, **__: model)
    return seen


def talk(monkeypatch, capsys, text: str, *flags: str) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    call("sample", ["--chat", "runs/none", *flags])
    return tuple(capsys.readouterr())


def test_what_the_model_sees(monkeypatch, capsys, answers):
    lines = "hi\n\n  you \n/reset\na\n/system be brief\nb\n/what\n/quit\nnot read\n"
    out, err = talk(monkeypatch, capsys, lines, "--max-tokens", "8")
    assert out == "héé\n" * 4 and "\ufffd" not in out
    end = ByteTokenizer().eos_token
    said = f"user:\nhi{end}assistant:\n"
    assert answers == [
        said,
        f"{said}héé{end}user:\nyou{end}assistant:\n",
        f"user:\na{end}assistant:\n",
        f"system:\nbe brief{end}user:\nb{end}assistant:\n",
    ]
    assert "[template plain; " in err and "[a new conversation, with this instruction]" in err
    assert "[/what is not known" in err


def test_the_oldest_messages_are_left_out_and_that_is_said(monkeypatch, capsys, answers):
    lines = "".join(f"{letter * 9}\n" for letter in "abcde")
    _, err = talk(monkeypatch, capsys, lines, "--max-tokens", "8", "--system", "s")
    end = ByteTokenizer().eos_token
    assert answers[-1].startswith(f"system:\ns{end}user:\n") and "aaa" not in answers[-1]
    assert answers[-1].endswith(f"user:\neeeeeeeee{end}assistant:\n")
    assert all(len(ByteTokenizer().encode(seen.replace(end, "|"))) <= 56 for seen in answers)
    assert "[the first 2 messages are left out: 64 tokens are too few]" in err
    _, err = talk(monkeypatch, capsys, "x" * 99 + "\n", "--max-tokens", "8")
    assert "[the model sees the last 64 tokens of this message]" in err


def test_ctrl_c_ends_an_answer_and_keeps_it(monkeypatch, capsys, model):
    def made(*_, **__):
        yield [[]]
        yield [list(b"half")]
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "generate", made)
    dialogue = Dialogue(model, ChatOptions(run="x"), lambda line: None)
    chat._write(dialogue.answer("q"))
    out, err = capsys.readouterr()
    assert out == "half\n" and "[stopped]" in err
    assert dialogue.messages[-1] == {"role": "assistant", "content": "half"}


@pytest.mark.parametrize("error", [EOFError, KeyboardInterrupt])
def test_the_end_of_the_input_at_a_terminal(monkeypatch, error):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def ends(prompt: str) -> str:
        raise error

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ends)
    assert list(chat.messages()) == []


def test_a_line_that_is_not_text_is_left_out(monkeypatch, capsys):
    raw = io.TextIOWrapper(io.BytesIO(b"\xff\nyes\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", raw)
    assert list(chat.messages()) in ([], ["yes"])
    assert "not UTF-8" in capsys.readouterr().err


def test_a_run_answers_as_it_generates(config_file, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", config_file, 1, 0)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    call("sample", ["--chat", run, "--max-tokens", "6", "--temperature", "0", "--step", "2"])
    out = capsys.readouterr().out
    m = load(run, 2, 1, print)
    ids = [*m.tokenizer.encode("user:\nthe cat").tolist(), m.tokenizer.eos_id]
    ids += m.tokenizer.encode("assistant:\n").tolist()
    made = generate(
        m.weights,
        m.cfg,
        m.mesh,
        [ids],
        Sampling(temperature=0.0),
        max_tokens=6,
        vocab_size=m.tokenizer.vocab_size,
        stop={m.tokenizer.eos_id},
    )
    assert out == m.tokenizer.decode([i for (new,) in made for i in new]) + "\n"
    assert template_of(m) == "plain"


def test_options_that_cannot_work():
    for flags, said in (
        (["--temperature", "-1"], "--temperature = -1.0: must be 0 or more"),
        (["--top-p", "0"], "--top-p = 0.0: must be above 0"),
        (["--max-tokens", "0"], "--max-tokens = 0: must be at least 1"),
        (["--template", "qwen"], "--template"),
    ):
        with pytest.raises(ConfigError, match=said):
            call("sample", ["--chat", "runs/none", *flags])
