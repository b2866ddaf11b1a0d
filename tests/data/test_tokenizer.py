"""data/tokenizer.py: ids, control tokens, EOS, streamed text, chat templates, names that lead nowhere."""

import concurrent.futures
import http.server
import json
import pathlib
import pickle
import re
import threading

import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants
from tokenizers import models

from data import DataError, corpus, hub, sources, tokenizer
from tests.conftest import ROOT
from tests.support import small_tokenizers

pytestmark = pytest.mark.promise("tokenizers")

FILES = {
    "bytes": dict,
    "byte_level": small_tokenizers.byte_level,
    "metaspace": small_tokenizers.metaspace,
}
TEXTS = [
    "", "a", "  two  spaces\n\n\n\ttab", "naïve — 漢字かな 🦊👩‍👩‍👧", "def f():\n        return '🦊'\n\n",
    "<|im_start|>user<|im_end|></s><s>[INST] <|start|>", "\r\n\x00\x7f",
]  # fmt: skip
CASES = json.loads((ROOT / "tests" / "golden" / "chat_templates.json").read_text())


@pytest.fixture(params=FILES)
def tokens(request):
    return tokenizer.from_files(FILES[request.param](), request.param)


def changed(files: dict[str, bytes], name: str, **keys) -> dict[str, bytes]:
    """Changes values in a JSON file; ... removes a key."""
    content = json.loads(files.get(name, b"{}")) | keys
    return files | {name: json.dumps({k: v for k, v in content.items() if v is not ...}).encode()}


# ---- ids -----------------------------------------------------------------------------------------


def test_text_comes_back(tokens):
    for text, ids in zip(TEXTS, tokens.encode(TEXTS), strict=True):
        assert ids.dtype == np.int32
        assert tokens.decode(ids) == text
        assert all(0 <= i < tokens.size for i in ids)
    assert tokens.decode([*tokens.start, *tokens.encode(["hi"])[0], *tokens.end, -1, 10**6]) == "hi"


def test_text_that_spells_a_control_token_stays_text(tokens):
    control = {*tokens.start, *tokens.end, 0, 1, 2} if tokens.files else {256}
    for text in TEXTS:
        assert not control & set(tokens.encode([text])[0].tolist()), text
    if tokens.files:
        assert tokens.end[0] in tokens.encode_rendered("<|im_end|></s>")


def test_tokens_that_start_and_end_a_text(tokens):
    wanted = {"bytes": (256, ()), "byte_level": (None, (2, 0)), "metaspace": (1, (2,))}
    start, end = wanted[tokens.name]
    assert (tokens.start, tokens.end) == ((start,) if start is not None else (), end)


def test_bytes_and_lone_surrogates_are_text_too(tokens):
    bad = tokens.encode([b"a\xff", "a\udcff"])
    assert tokens.decode(bad[0]) == "a\ufffd"
    assert tokens.decode(bad[1]) == "a?"


def test_it_is_pickled_as_its_files(tokens):
    tokens.encode(["made"])
    again = pickle.loads(pickle.dumps(tokens))
    assert again == tokens
    assert again.files == tokens.files
    np.testing.assert_array_equal(again.encode(["a b"])[0], tokens.encode(["a b"])[0])


def test_limits_of_a_file_cut_nothing():
    made = tokenizers.Tokenizer.from_str(small_tokenizers.byte_level()["tokenizer.json"].decode())
    made.enable_truncation(4)
    made.enable_padding(length=64)
    found = tokenizer.from_files({"tokenizer.json": made.to_str().encode()})
    assert found.decode(found.encode(["some words " * 9])[0]) == "some words " * 9


@pytest.mark.promise("user-errors")
@pytest.mark.parametrize("model", [models.WordLevel({"a": 0}), models.Unigram([("a", -1.0)])])
@pytest.mark.parametrize("known", ["a", "b"])
def test_one_without_an_unknown_token_is_one_line(model, known):
    """The error comes at once, or with the first text that needs the token."""
    files = {"tokenizer.json": tokenizers.Tokenizer(model).to_str().replace('"a"', f'"{known}"')}
    with pytest.raises(DataError, match=r"the tokenizer x can't encode every text \(.*\); use one"):
        tokenizer.from_files({k: v.encode() for k, v in files.items()}, "x").encode(["b"])


@pytest.mark.parametrize("block", [1, 2, 3, 7, 2**20])
def test_bytes_of_text_are_the_same_in_blocks(tokens, block, monkeypatch):
    """A block that begins with a space, or in the middle of a character, loses nothing."""
    monkeypatch.setattr(tokenizer, "BLOCK", block)
    for text in TEXTS:
        assert tokens.text_bytes(tokens.encode([text])[0]) == len(text.encode()), text


def test_a_text_that_ends_in_replacement_characters_keeps_their_bytes(tokens):
    """Decoding gives U+FFFD for an incomplete character too, whose bytes don't count."""
    for text in ("ok\ufffd\ufffd", "\ufffd", "字\ufffd"):
        ids = tokens.encode([text])[0]
        assert tokens.text_bytes(ids) == len(text.encode()), text
    for text in ("ok🙂", "ok\ufffd🙂"):
        ids = tokens.encode([text])[0]
        whole = [n for n in range(len(ids)) if "🙂" in tokens.decode(ids[: n + 1])]
        cut = ids[: whole[0]]  # in the middle of the last character
        assert tokens.decode(cut).endswith("\ufffd")
        if tokens.files:  # with bytes, each is a target
            assert tokens.text_bytes(cut) == len(text.encode()) - 4


# ---- which token ends a text ---------------------------------------------------------------------

NO_EOS = {"eos_token": ...}


@pytest.mark.parametrize(
    ("generation", "config", "model", "end"),
    [
        ({"eos_token_id": [2, 0]}, {}, None, (2, 0)),
        ({"eos_token_id": 0}, {}, None, (0,)),
        ({"eos_token_id": ...}, {}, {"eos_token_id": 0}, (2,)),
        ({"eos_token_id": ...}, {"eos_token": {"content": "<|endoftext|>"}}, None, (0,)),
        ({"eos_token_id": []}, NO_EOS, {"eos_token_id": [1, 0]}, (1, 0)),
        ({"eos_token_id": None}, NO_EOS, {"eos_token_id": None}, ()),
        ({"eos_token_id": ...}, NO_EOS, None, ()),
    ],
)
def test_the_end_is_what_the_first_file_says(generation, config, model, end, tmp_path):
    files = changed(small_tokenizers.byte_level(), "generation_config.json", **generation)
    files = changed(files, "tokenizer_config.json", **config)
    if model is not None:
        files["config.json"] = json.dumps(model | {"hidden_size": 1}).encode()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = tokenizer.find(str(tmp_path))
    assert found.end == end
    assert ("config.json" in found.files) == (model is not None and 2 not in end), "only if needed"
    assert tokenizer.from_files(found.files).end == end
    assert tokenizer.find(str(tmp_path / "tokenizer.json")) == found


def test_special_tokens_map_is_read_where_the_config_says_nothing():
    files = changed(small_tokenizers.byte_level(), "generation_config.json", eos_token_id=...)
    files = changed(files, "tokenizer_config.json", eos_token=...)
    files = changed(files, "special_tokens_map.json", eos_token="<|endoftext|>")
    assert tokenizer.from_files(files).end == (0,)


@pytest.mark.parametrize(
    ("config", "special", "bos", "eos"),
    [
        ({"bos_token": None}, {"bos_token": "<|endoftext|>"}, "<|endoftext|>", "<|im_end|>"),
        ({}, {"eos_token": {"content": "<|endoftext|>"}}, "<|im_start|>", "<|endoftext|>"),
        ({}, {"eos_token": None}, "<|im_start|>", "<|im_end|>"),
        ({"added_tokens_decoder": {}}, {"eos_token": "<|endoftext|>"}, "<|im_start|>", "<|im_end|>"),
        ({"added_tokens_decoder": {}, "bos_token": None}, {"bos_token": "<|endoftext|>"}, None, "<|im_end|>"),
    ],
)  # fmt: skip
def test_special_tokens_map_wins_in_old_folders(config, special, bos, eos):
    """All of these are what transformers 5.24 does."""
    files = changed(small_tokenizers.byte_level(), "generation_config.json", eos_token_id=...)
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    files = changed(files, "tokenizer_config.json", chat_template=template, **config)
    files = changed(files, "special_tokens_map.json", **special)
    found = tokenizer.from_files(files)
    assert found.render([{"role": "user", "content": "a"}]) == f"{bos or ''}a{eos}"
    assert found.end == (found._library.token_to_id(eos),)


# ---- tokens that tokenizer.json does not have, or does not mark ----------------------------------

TURN = "{% for m in messages %}{{ '<|turn|>' + m.content }}{% endfor %}"
SPECIAL = {"content": "<|turn|>", "special": True, "normalized": False}
WORD = {"content": "<tool>", "special": False, "normalized": True}


def with_added(config: dict, **files) -> dict[str, bytes]:
    """A tokenizer of 512 tokens whose template writes <|turn|>."""
    found = changed(
        small_tokenizers.byte_level(), "tokenizer_config.json", chat_template=TURN, **config
    )
    return found | {f"{name}.json": json.dumps(content).encode() for name, content in files.items()}


@pytest.mark.parametrize(
    ("files", "is_special"),
    [
        (with_added({"added_tokens_decoder": {"512": SPECIAL, "513": WORD}}), True),
        (with_added({"added_tokens_decoder": {"513": WORD, "512": SPECIAL}}), True),
        (with_added({"additional_special_tokens": ["<|turn|>"]}, added_tokens={"<tool>": 513, "<|turn|>": 512}), True),
        (with_added({}, added_tokens={"<|turn|>": 512, "<tool>": 513}), False),
        (with_added({}, added_tokens={"<|turn|>": 512, "<tool>": 513}, special_tokens_map={"additional_special_tokens": [{"content": "<|turn|>"}]}), True),
    ],
    ids=["decoder", "any order", "config", "file", "map"],
)  # fmt: skip
def test_a_token_that_only_other_files_have_is_one_id(files, is_special, tmp_path):
    """The ids are those of transformers 5.24."""
    found = tokenizer.from_files(files, "it")
    assert found.size == 514
    first, *rest = found.encode_rendered(found.render([{"role": "user", "content": "a <tool>"}]))
    assert first == 512
    assert rest == [*found.encode(["a "])[0], 513]
    (tokens,) = found.encode(["<tool> <|turn|>"])
    assert tokens[0] == 513, "a word of the vocabulary is one id in any text"
    assert (512 not in tokens) == is_special, "and a control token stays text"
    assert found.decode([512, 513]) == ("<tool>" if is_special else "<|turn|><tool>")
    plain = tokenizer.from_files(small_tokenizers.byte_level())
    assert found != plain
    assert found.sha256 == plain.sha256, "that of tokenizer.json"
    without = with_added({"additional_special_tokens": ["<|turn|>"]})
    assert found.chat_key != tokenizer.from_files(without).chat_key, "chats have other tokens"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert tokenizer.find(str(tmp_path)) == found
    assert pickle.loads(pickle.dumps(found)) == found
    (tmp_path / "a.txt").write_text("some <tool> or other\n" * 9)
    source = sources.find(str(tmp_path / "a.txt"))
    folders = {corpus.prepare(*source, one).folder for one in (found, plain)}
    assert len(folders) == 2, "each has its own cache entry"


def test_a_token_of_the_vocabulary_that_is_not_marked_is_one_id():
    """Old files name their end of text only in tokenizer_config.json."""
    files = small_tokenizers.byte_level()
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"] = []
    files = files | {"tokenizer.json": json.dumps(content).encode()}
    found = tokenizer.from_files(files, "it")
    assert found.size == 512
    assert found.encode_rendered("<|im_start|>a<|im_end|>").tolist() == [
        1,
        *found.encode(["a"])[0],
        2,
    ]
    assert found.decode([1, 2]) == ""
    assert not {1, 2} & {*found.encode(["<|im_start|><|im_end|>"])[0].tolist()}
    padded = changed(files, "tokenizer_config.json", pad_token="the")
    assert tokenizer.from_files(padded).decode(found.encode(["the"])[0]) == "the", "still a word"


def test_added_tokens_that_nothing_needs_take_no_id():
    """A model may have no rows for control tokens at the end, nor for ids that nobody can have."""
    decoder = {"512": SPECIAL, "513": {"content": "<pad>", "special": True}}
    files = with_added({"added_tokens_decoder": decoder, "pad_token": "<pad>"})
    assert tokenizer.from_files(files).size == 513
    files = with_added({"added_tokens_decoder": {"512": SPECIAL, "7": WORD, "900": WORD}})
    assert tokenizer.from_files(files).size == 513
    assert tokenizer.from_files(with_added({"additional_special_tokens": ["<|turn|>"]})).size == 512


@pytest.mark.promise("user-errors")
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (with_added({"added_tokens_decoder": {"600": SPECIAL}}), "the files of the tokenizer it give '<|turn|>' the id 600, but after the tokens of tokenizer.json it has 512; fetch files that belong together"),
        (with_added({}, added_tokens={"<|turn|>": 7}), "give '<|turn|>' the id 7, but after the tokens of tokenizer.json it has 512"),
        (with_added({"added_tokens_decoder": {"x": SPECIAL}}), "the added tokens of the tokenizer it are not in the form of `transformers`; fetch"),
        (with_added({"added_tokens_decoder": {"512": "<|turn|>"}}), "the added tokens of the tokenizer it are not in the form"),
        (with_added({}, added_tokens=["<|turn|>"]), "added_tokens.json of the tokenizer it is not a JSON object"),
    ],
)  # fmt: skip
def test_added_tokens_that_do_not_fit_are_one_line(files, said):
    with pytest.raises(DataError) as caught:
        tokenizer.from_files(files, "it")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- streamed ------------------------------------------------------------------------------------


def test_streamed_text_is_whole_at_every_step(tokens):
    for text, ids in zip(TEXTS, tokens.encode(TEXTS), strict=True):
        stream = tokens.stream()
        parts = [stream.put(token) for token in ids]
        assert "".join(parts) + stream.rest() == text
        assert not any("\ufffd" in part for part in parts)


def test_a_broken_end_is_shown_at_the_end(tokens):
    ids = tokens.encode(["ab 🦊"])[0][:-1]
    stream = tokens.stream()
    assert "".join(map(stream.put, ids)) == "ab "
    assert set(stream.rest()) == {"\ufffd"}
    assert stream.rest() == ""


def test_any_tokens_can_be_streamed(tokens):
    """Models may write bytes that aren't text, on which the library's own stream fails."""
    random = np.random.default_rng(0)
    for _ in range(300):
        ids = random.integers(-1, tokens.size + 2, 20)
        stream = tokens.stream()
        text = "".join(map(stream.put, ids)) + stream.rest()
        if tokens.name != "metaspace":  # there one bad byte spoils the good ones beside it
            assert text == tokens.decode(ids)


# ---- chat templates ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_templates_are_rendered_as_reviewed(case):
    """The golden was written by hand; tests/by_hand/tokenizer_parity.py compares it with transformers."""
    config = {"chat_template": "overridden", **case["tokens"]}
    files = small_tokenizers.byte_level() | {"tokenizer_config.json": json.dumps(config).encode()}
    files |= {"chat_template.jinja": case["template"].encode()}
    files = changed(files, "generation_config.json", eos_token_id=2)
    config["eos_token"] = ...
    found = tokenizer.from_files(files, "it")
    if "error" in case:
        with pytest.raises(DataError, match=re.escape(case["error"])):
            found.render(case["messages"], case["prompt"])
    else:
        assert found.render(case["messages"], case["prompt"]) == case["rendered"]


def test_a_processor_s_template_comes_before_the_tokenizer_s():
    """As in transformers: chat_template.jinja, then chat_template.json, then tokenizer_config.json."""
    files = small_tokenizers.byte_level()
    old = {"chat_template.json": b'{"chat_template": "old"}'}
    new = {"chat_template.jinja": b"new"}
    assert tokenizer.from_files(files).template == small_tokenizers.TEMPLATE
    assert tokenizer.from_files(files | old).template == "old"
    assert tokenizer.from_files(files | old | new).template == "new"


def test_a_rendered_template_is_not_given_a_second_bos():
    found = tokenizer.from_files(small_tokenizers.metaspace())
    ids = found.encode_rendered(found.render([{"role": "user", "content": "hi <s>"}])).tolist()
    assert ids[0] == 1
    assert found.start == (1,)
    assert ids.count(1) == 2, "its own, and what the user spells"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_a_template_can_do_nothing_but_render(template):
    files = small_tokenizers.byte_level() | {"chat_template.jinja": template.encode()}
    found = tokenizer.from_files(files, "it")
    said = "the chat template of it can't be rendered ("
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        raise DataError(said + repr(found.render([{"role": "user", "content": "x"}])))
    assert "\n" not in str(caught.value)


# ---- the bytes, for others -----------------------------------------------------------------------


def test_the_bytes_are_written_as_a_tokenizer_that_others_read(tmp_path):
    files = tokenizer.BYTES.shared()
    assert tokenizer.BYTES.sha256.startswith("d817aeed9f10"), "older exports would not be known"
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS[:5]:
        assert theirs.encode(text).ids == [256, *text.encode()]
        assert theirs.decode([*text.encode()]) == text
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    assert tokenizer.find(str(tmp_path)) is tokenizer.BYTES


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path):
    for name in ("empty", "pieces", "ranks", "broken", "list", "eos", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "pieces" / "tokenizer.model").write_bytes(b"\x00")
    (tmp_path / "ranks" / "tiktoken.model").write_bytes(b"IQ== 0\n")  # as Kimi K2
    good = small_tokenizers.byte_level()
    folders = {
        "broken": {"tokenizer.json": b'{"model": '},
        "list": good | {"generation_config.json": b"[1]"},
        "eos": changed(good, "generation_config.json", eos_token_id=[2, 512]),
        "config": changed(
            changed(good, "generation_config.json", eos_token_id=...),
            "tokenizer_config.json",
            eos_token="<eos>",
        ),
    }
    for folder, files in folders.items():
        for name, content in files.items():
            (tmp_path / folder / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{here}/no", "--tokenizer={here}/no does not exist; use bytes, a tokenizer.json, a folder that has one, or ORG/NAME on the Hub"),
        ("", "--tokenizer= does not exist"),
        ("train", "--tokenizer=train: runs train no tokenizer; five lines with the library tokenizers do (recipes/docs/tokenizers.md), then use --tokenizer=FOLDER"),
        ("x" * 5000, "can't be read (File name too long); use another"),
        ("{here}/empty", "--tokenizer={here}/empty has no tokenizer.json; use a folder that has one, or bytes"),
        ("{here}/pieces", "{here}/pieces has its tokenizer only in tokenizer.model, which the zoo does not read; add its tokenizer.json"),
        ("{here}/ranks", "{here}/ranks has its tokenizer only in tiktoken.model, which the zoo does not read; add its tokenizer.json"),
        ("{here}/broken", "tokenizer.json of the tokenizer {here}/broken can't be read ("),
        ("{here}/list", "generation_config.json of the tokenizer {here}/list is not a JSON object"),
        ("{here}/eos", "the tokenizer {here}/eos has 512 tokens, but [2, 512] should end a text"),
        ("{here}/config", "the tokenizer {here}/config has 512 tokens, but ['<eos>'] should end a text"),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere_is_one_line(name, said, here):
    with pytest.raises(DataError) as caught:
        tokenizer.find(name.replace("{here}", str(here)))
    assert said.replace("{here}", str(here)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_trained_in_five_lines_as_shown(tmp_path, monkeypatch):
    page = (ROOT / tokenizer.GUIDE).read_text()
    code = page.split("<!-- python: train a tokenizer -->\n```python\n", 1)[1].split("```", 1)[0]
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 5
    monkeypatch.chdir(tmp_path)
    text = " ".join(small_tokenizers.words()) + "\n"
    pathlib.Path("notes.txt").write_text(text)
    exec(code, {})
    found = tokenizer.find("mine")
    (ids,) = found.encode([text])
    assert found.decode(ids) == text
    assert len(ids) < len(text) / 3, "it has learned words"
    assert (found.start, found.end) == ((), (0,))
    assert found.encode_rendered("<|endoftext|>").tolist() == [0]
    assert 0 not in found.encode(["<|endoftext|>"])[0]


def test_bytes_have_no_chat_template():
    with pytest.raises(DataError, match="the tokenizer bytes has no chat template; use a chat"):
        tokenizer.BYTES.render([])


# ---- the Hub -------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Returns a function that replaces the Hub by a server with this status; 0: unreachable."""
    servers = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            self.send_response(self.server.code)
            if self.server.code == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    def begin(code: int) -> list[str]:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.code, server.asked = code, []
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        if code:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        else:
            server.server_close()
        return server.asked

    yield begin
    for server in servers:
        if server.code:
            server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (404, "{what} is neither local nor on the Hub, or you may not read it; check the name"),
        (503, "{what} is not local, and the Hub can't be reached ("),
        (0, "{what} is not local, and the Hub can't be reached ("),
    ],
)
@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("--tokenizer=no/such", lambda: tokenizer.find("no/such")),
        ("--dataset=hf:no/such", lambda: hub.load("no/such", "hf:no/such")),
        ("no/such", lambda: hub.snapshot("no/such", ["config.json"], "no/such")),
    ],
)
def test_the_hub_is_asked_once_and_quietly(what, ask, code, said, answers, capfd):
    asked = answers(code)
    with pytest.raises(DataError) as caught:
        ask()
    assert said.replace("{what}", what) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert len([path for path in asked if "such" in path]) == (1 if code else 0), "no retries"


def test_threads_may_encode_text_and_templates_at_once():
    """Only a template may spell control tokens, whatever another thread encodes meanwhile."""
    tokens = tokenizer.from_files(small_tokenizers.byte_level())
    both = "<|im_start|>user\nHi<|im_end|>"
    encode = [lambda: tokens.encode([both])[0], lambda: tokens.encode_rendered(both)]
    want = [one().tolist() for one in encode]
    assert want[0] != want[1]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(encode[i % 2]) for i in range(400)]
        assert all(one.result().tolist() == want[i % 2] for i, one in enumerate(found))
