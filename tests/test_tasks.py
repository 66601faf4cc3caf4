"""The tasks in the manner of RULER, on a tiny model that reads characters."""

import csv
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import logits_of, tiny_llama

LENGTHS = (2048, 2560)
NAMES = ("plain RoPE", "ours")


class Characters:
    """A token for each printable character."""

    CHARACTERS = "\0" + "".join(map(chr, range(32, 127))) + "\n"

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        assert not add_special_tokens
        ids = [self.CHARACTERS.index(character) for character in text]
        return SimpleNamespace(input_ids=ids if return_tensors is None else torch.tensor([ids]))

    def decode(self, ids):
        return "".join(self.CHARACTERS[index] for index in ids)


TOKENIZER = Characters()


def plain_text(tokenizer, name, length):
    return TOKENIZER(f"{name} lay on hay. " * length, False, "pt").input_ids[:, :length]


@pytest.fixture
def tasks(results, monkeypatch):
    """`quality.tasks` with a tiny model and a plain text."""
    from quality import haystacks, tasks

    monkeypatch.setattr(haystacks, "KEYS", 4)
    monkeypatch.setattr(haystacks, "ids_of", plain_text)
    monkeypatch.setattr(tasks, "LENGTHS", {"qwen": LENGTHS})
    monkeypatch.setattr(tasks, "named", lambda model, dtype: small_model())
    monkeypatch.setattr(
        tasks, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: TOKENIZER)
    )
    return tasks


def small_model():
    return tiny_llama(max_position_embeddings=1024, num_hidden_layers=2)


def haystack(tasks, name="report", lengths=LENGTHS):
    return tasks.Haystack(TOKENIZER, name, lengths)


def written(results):
    with (results / "tasks.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def answers_in(context, question):
    """What a reader of the context would answer, each with the place where it is told."""
    asked = question.prompt
    if found := re.search(r"What is the (.*)\?", asked):
        told = re.finditer(rf"\n\nThe {found[1]} is (\d+)\.\n\n", context)
        return [(match[1], match.start()) for match in told]
    if found := re.search(r"What are the four lucky numbers of (\w+)\?", asked):
        told = re.finditer(rf"One of the lucky numbers of {found[1]} is (\d+)\.", context)
        return [(match[1], match.start()) for match in told]
    number = re.search(r"with the value (\d+)\?", asked)[1]
    values, named = {number}, []
    for match in re.finditer(r"The variable (\w+) is set to (?:the variable )?(\w+)\.", context):
        if match[2] in values:  # told in order
            values.add(match[1])
            named.append((match[1], match.start()))
    return named


@pytest.mark.parametrize("name", ["report", "reference"])
def test_answers_are_what_the_text_says(tasks, monkeypatch, name):
    from quality import haystacks

    monkeypatch.setattr(haystacks, "KEYS", 8)
    hay = haystack(tasks, name, lengths := (4096, 8192, 12288))
    text = TOKENIZER.decode(hay.ids[0].tolist())
    assert len(text) == lengths[-1]
    per_length = [("single", 1)] * 4 + [("keys", 1)] * 8 + [("values", 4), ("variables", 4)]
    assert [(one.task, one.length) for one in hay.questions] == [
        (task, length) for length in lengths for task, _ in per_length
    ]
    for question, (_, count) in zip(hay.questions, per_length * len(lengths), strict=True):
        found = answers_in(text[: question.length], question)
        assert [(word, 4 * at // question.length) for word, at in found] == list(question.answers)
        assert len(found) == count
        assert found == answers_in(text, question)  # nothing more of it comes later


def test_every_quarter_is_asked_of_alike(tasks):
    for length in LENGTHS:
        for task in tasks.TASKS:
            quarters = [
                quarter
                for question in haystack(tasks).questions
                if (question.task, question.length) == (task, length)
                for _, quarter in question.answers
            ]
            assert sorted(quarters) == [0, 1, 2, 3]


def test_a_text_has_its_own_facts_and_always_the_same(tasks):
    one, same, other = (haystack(tasks, name) for name in ("report", "report", "reference"))
    assert torch.equal(one.ids, same.ids)
    assert one.questions == same.questions
    assert not {a.answers for a in one.questions} & {b.answers for b in other.questions}


def test_a_fact_longer_than_its_slot_is_refused(tasks, monkeypatch):
    from quality import haystacks

    monkeypatch.setattr(haystacks, "SLOT", 32)
    with pytest.raises(ValueError, match="at most 32 tokens, got"):
        haystack(tasks)


def test_the_score_is_of_whole_words_in_any_order(tasks):
    question = tasks.Question("values", 1, "", (("111", 0), ("222", 1), ("333", 2), ("444", 3)))
    reply = " 444, 1111 and (333). 2 22"
    assert tasks.score(question, reply) == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)]


@pytest.mark.parametrize("name", NAMES)
def test_replies_are_those_of_greedy_decoding_without_a_cache(tasks, name):
    from quality import rivals

    hay, rival = haystack(tasks), rivals.make(small_model(), name, LENGTHS[-1])
    for length, replies in tasks.asked(hay, LENGTHS, rival, TOKENIZER, ""):
        assert [one for one, _ in replies] == [one for one in hay.questions if one.length == length]
        for question, reply in replies[-6::2]:  # of each task
            new = TOKENIZER(reply, False, "pt").input_ids
            prompt = TOKENIZER(question.prompt, False, "pt").input_ids
            ids = torch.cat((hay.ids[:, :length], prompt, new), dim=1)
            logits = logits_of(rival.model, ids, use_cache=False)[0]
            assert torch.equal(logits[-new.shape[1] - 1 : -1].argmax(-1), new[0])
            told = sum(len(word) + 3 for word, _ in question.answers) - 1
            assert reply.index("\n") == len(reply) - 1 if "\n" in reply else len(reply) == told + 4


def test_rows_are_the_shares_of_answers(tasks):
    hay = haystack(tasks)
    wrong = "nothing"

    def right(question):
        return ", ".join(word for word, quarter in question.answers if quarter >= 2)

    here = [one for one in hay.questions if one.length == LENGTHS[0]]
    replies = [(one, right(one) if one.task != "keys" else wrong) for one in here]
    for one in tasks.rows_of_replies("ours", replies):
        task, quarter = one["quantity"].split(", quarter ")
        assert one["samples"] == 1
        assert one["mean"] == (task != "keys" and int(quarter) > 2)


def test_an_interrupted_run_of_tasks_goes_on_where_it_stopped(tasks, results, monkeypatch):
    asked = []

    def reply_to(question, rival, tokenizer, cache):
        asked.append((question.length, cache.get_seq_length()))
        if len(asked) == 15:
            raise KeyboardInterrupt
        return "no"

    monkeypatch.setattr(tasks, "reply_to", reply_to)
    monkeypatch.setattr(tasks, "TEXTS", ("report",))
    with pytest.raises(KeyboardInterrupt):
        tasks.tasks("qwen", names=NAMES)
    at_first = written(results)
    assert {(one["variant"], one["tokens"]) for one in at_first} == {("plain RoPE", "2048")}
    tasks.tasks("qwen", names=NAMES)
    rows = written(results)
    assert rows[: len(at_first)] == at_first
    names = ("variant", "tokens", "quantity")
    assert len({tuple(one[name] for name in names) for one in rows}) == len(rows) == 4 * 17
    assert {one["quantity"] for one in rows if one["unit"] == "s"} == {"time"}
    assert all(length == held for length, held in asked)
    # The first length of the first rival was not asked again.
    assert sum(length == LENGTHS[0] for length, _ in asked) == 2 * 10
    tasks.tasks("qwen", names=NAMES)
    assert written(results) == rows


def test_some_lengths_then_the_others(tasks, results, monkeypatch):
    monkeypatch.setattr(tasks, "reply_to", lambda *_: "no")
    tasks.tasks("qwen", LENGTHS[1:], NAMES[:1])
    assert {one["tokens"] for one in written(results)} == {"2560"}
    tasks.tasks("qwen", names=NAMES[:1], dtype="float32")
    tasks.tasks("qwen", names=NAMES[:1])
    found = [(one["dtype"], one["note"], one["tokens"]) for one in written(results)]
    assert len(found) == 17 * len(set(found)) == 17 * 8
    with pytest.raises(ValueError, match=r"must be among \(2048, 2560\), got \(4096,\)"):
        tasks.tasks("qwen", [4096])
