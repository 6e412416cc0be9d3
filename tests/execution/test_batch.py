"""Requests that decode together give what each gives alone, and hold only what it will see."""

import random
from itertools import permutations, product

import pytest
import torch
from tests.execution.eager import assert_near, lively_hf, rounding, spanned
from tests.execution.test_masks import all_local, random_map
from tests.tiny import random_ids
from torch import Tensor

from redknot.execution import ExecutionSettings, Prefilled, batch
from redknot.execution.batch import DecodeBatch
from redknot.execution.generate import Sampling, decode
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.kernels.attend import Reach
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery import Policy
from redknot.recovery.policies import Dense, Duo
from redknot.segments import Prompt
from redknot.segpaged import OutOfPages

MAX_TOKENS = 400
GREEDY = Sampling(max_tokens=40)


class Company:
    """A batch, and beside it every request alone: extended token by token in another session, with
    all of its pages."""

    def __init__(
        self,
        name: str = "llama",
        *,
        max_requests: int = 4,
        max_tokens: int = MAX_TOKENS,
        page_size: int = 16,
        num_pages: int | None = None,
    ) -> None:
        self.hf = lively_hf(name)
        model = wrap_model(self.hf, byte_tokenizer(add_bos=True), name)
        settings = ExecutionSettings(page_size=page_size, num_pages=num_pages)
        self.session, self.alone = Session(model, settings=settings), Session(model)
        self.batch = DecodeBatch(self.session.executor, max_requests, max_tokens)
        self.pool = self.session.executor.storage.pool
        self.twins: list[Prefilled] = []
        self.starts: list[int] = []
        "Tokens of each prompt."

    def add(self, prompt: Prompt, policy: Policy, head_map: HeadMap | None = None) -> None:
        """One more request."""
        number = self.batch.add(self.session.prefill(prompt, policy, head_map))
        self.session.beginnings.forget()  # of which pages would be shared
        assert number == len(self.twins)
        self.twins.append(self.alone.prefill(prompt, policy, head_map))
        self.starts.append(len(prompt))

    def remove(self, number: int) -> None:
        """The last request gets the number of the one that goes."""
        gone = self.batch.remove(number)
        assert torch.equal(gone.token_ids, self.twins[number].token_ids)
        for held in (self.twins, self.starts):
            held[number] = held[-1]
            held.pop()

    def step(self, tokens: list[int]) -> None:
        """All logits are those of the twins: either is off by ``rounding`` at most."""
        logits = self.batch.step(tokens)
        assert logits.shape == (len(self.twins), self.hf.config.vocab_size)
        for twin, token, got in zip(self.twins, tokens, logits, strict=True):
            truth = self.alone.executor.extend(twin, torch.tensor([token]))[0]
            assert_near(got, truth, 2 * rounding(self.hf, twin.cache.length))
        assert self.batch.lengths == [twin.cache.length for twin in self.twins]

    def steps(self, count: int, seed: int = 0) -> None:
        """Random tokens, others for each request."""
        for index in range(count):
            self.step(random_ids(len(self.twins), seed=seed + index).tolist())

    def check_pages(self) -> None:
        """Every request holds the pages that rows from the page in work on see; the pool has given
        out those and one more."""
        size, total = self.session.executor.storage.page_size, 1
        rows = zip(self.batch.requests, self.batch.lengths, self.starts, strict=True)
        for request, length, start in rows:
            position = max(start, (length - 1) // size * size)
            pages = range(-(-length // size))
            seen = [
                [[shows(reach, position, page, size) for page in pages] for reach in layer]
                for layer in request.sight.decode
            ]
            assert (request.cache.table >= 0).tolist() == seen
            total += sum(page for layer in seen for group in layer for page in group)
        assert self.pool.num_used == total
        self.pool.check()


def shows(reach: Reach, position: int, page: int, size: int) -> bool:
    """Whether some row from ``position`` on sees a token of ``page``: the nearest one, if any."""
    for token in range(page * size, (page + 1) * size):
        age = max(position - token, 0)
        near = reach.window is None or token < reach.sink or age < reach.window
        if near and (reach.horizon is None or age < reach.horizon):
            return True
    return False


def guests(company: Company) -> list[tuple[Prompt, Policy, HeadMap | None]]:
    """Long beside short, dense beside windowed, in the question alone and everywhere."""
    hf = company.hf
    return [
        (spanned(61, 40, seed=1), Dense(), None),
        (spanned(9, question=4, seed=2), Duo(), random_map(hf, 3)),
        (spanned(100, seed=3), Duo(windows="decode"), all_local(hf, 8, 4)),
        (spanned(2, question=3, seed=4), Duo(), all_local(hf, 1, 0)),
        (spanned(16, question=8, seed=5), Duo(windows="none"), random_map(hf, 4)),
        (spanned(30, 30, seed=6), Duo(windows="context"), random_map(hf, 5)),
    ]


@pytest.mark.parametrize("name", ["llama", "llama-9/3", "qwen2-14/2", "qwen3-yarn", "qwen2-mixed"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_requests_decode_in_company_what_they_decode_alone(count: int, name: str) -> None:
    company = Company(name, max_requests=6)
    for guest in guests(company)[:count]:
        company.add(*guest)
    company.steps(36)
    company.check_pages()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_order_of_requests_is_their_number_and_nothing_else(order: tuple[int, ...]) -> None:
    company = Company()
    for index in order:
        company.add(*guests(company)[index])
    company.steps(5)


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random schedule beside decoding one by one, with plans renewed after a few steps."""
    monkeypatch.setattr(batch, "REPLAN_STEPS", 1 + seed)
    draw, company = random.Random(seed), Company("llama" if seed % 2 else "qwen3", page_size=8)
    offered = guests(company)
    for index in range(70):
        room = len(company.twins)
        action = draw.choice(["add", "remove", "step", "step", "step"])
        if action == "add" and room < 4:
            company.add(*draw.choice(offered))
        elif action == "remove" and room:
            company.remove(draw.randrange(room))
        elif room:
            company.steps(1, seed=1000 * seed + index)
        company.check_pages()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_removing_any_request_leaves_the_others_as_they_were(number: int) -> None:
    company = Company()
    for guest in guests(company)[:3]:
        company.add(*guest)
    company.steps(3)
    company.remove(number)
    company.check_pages()
    company.steps(20, seed=3)
    company.add(*guests(company)[3])
    company.steps(20, seed=23)
    company.check_pages()


def test_the_only_request_leaves_an_empty_batch_that_takes_the_next_one() -> None:
    company = Company(max_requests=1)
    for guest in guests(company):
        company.add(*guest)
        company.steps(4)
        company.remove(0)
        assert company.batch.requests == []
        assert company.pool.num_used == 1


@pytest.mark.parametrize("layer", range(4))
def test_a_request_that_sees_otherwise_in_one_layer_is_planned_anew(layer: int) -> None:
    """Its predecessor saw alike in all layers, so that they shared one plan."""
    company = Company(max_requests=1)
    alike = all_local(company.hf, 8, 4).decode
    other = all_local(company.hf, 40, 0).decode
    mixed = (*alike[:layer], other[layer], *alike[layer + 1 :])
    for rules in (alike, mixed, alike):
        head_map = HeadMap(prefill=alike, decode=rules)
        company.add(spanned(61), Duo(windows="decode"), head_map)
        company.steps(2)
        company.remove(0)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_pages_held_are_those_that_will_be_seen(name: str, page_size: int) -> None:
    company = Company(name, page_size=page_size)
    for guest in guests(company)[:4]:
        company.add(*guest)
        company.check_pages()
    for index in range(70):
        company.steps(1, seed=index)
        company.check_pages()


def test_everything_goes_back_when_batch_and_prompts_are_dropped() -> None:
    company = Company()
    session = company.session
    prefilled = [session.prefill(*guest) for guest in guests(company)[:3]]
    session.beginnings.forget()
    for request in prefilled:
        company.batch.add(request)
    for _ in range(20):
        company.batch.step([1, 2, 3])
    del request
    own = sum(int((one.cache.table >= 0).sum()) for one in prefilled)
    assert company.pool.num_used == own + 1
    del company.batch
    assert company.pool.num_used == own
    del prefilled
    assert company.pool.num_used == 0
    company.pool.check([])


@pytest.mark.parametrize("replan_steps", [1, 3])
def test_renewed_plans_change_nothing(replan_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits() -> Tensor:
        company = Company()
        for guest in guests(company)[:3]:
            company.add(*guest)
        rows = []
        for token in range(20):
            rows.append(company.batch.step([token] * 3).clone())
        return torch.stack(rows)

    truth = logits()
    monkeypatch.setattr(batch, "REPLAN_STEPS", replan_steps)
    assert torch.equal(logits(), truth)


def test_storage_that_grows_in_the_middle_changes_nothing() -> None:
    company = Company()
    storage = company.session.executor.storage
    for guest in guests(company)[:3]:
        company.add(*guest)
    others = []
    for index in range(6):
        company.steps(3, seed=3 * index)
        planes = storage.planes["key"]
        others.append(company.session.prefill(spanned(200, seed=index), Dense()))
        assert storage.planes["key"] is not planes
    company.steps(20, seed=20)


def test_a_prompt_and_its_fork_decode_apart() -> None:
    """They share a page that is partly filled."""
    company = Company()
    prompt, hf = spanned(61, question=5), company.hf
    first = company.session.prefill(prompt, Duo(), all_local(hf, 8, 4))
    second = first.fork()
    for request in (first, second):
        company.batch.add(request)
        company.twins.append(company.alone.prefill(prompt, Duo(), all_local(hf, 8, 4)))
    company.steps(40)


def test_a_removed_request_goes_on_where_it_stopped() -> None:
    """In a batch again, and by `extend`."""
    company = Company()
    prompt, new = spanned(61, question=5), random_ids(12, seed=3)
    truth = company.alone.prefill(prompt, Dense())
    wanted = company.alone.executor.extend(truth, new)
    bound = 2 * rounding(company.hf, len(prompt) + len(new))
    for _ in range(2):
        company.batch.add(company.session.prefill(prompt, Dense()))
        for token in new[:3].tolist():
            company.batch.step([token])
        gone = company.batch.remove(0)
        assert company.batch.add(gone) == 0
        got = [company.batch.step([token])[0].clone() for token in new[3:6].tolist()]
        assert_near(torch.stack(got), wanted[3:6], bound)
        gone = company.batch.remove(0)
        assert_near(company.session.executor.extend(gone, new[6:]), wanted[6:], bound)


def test_a_full_batch_refuses_and_stays_as_it_was() -> None:
    company = Company(max_requests=2)
    for guest in guests(company)[:2]:
        company.add(*guest)
    with pytest.raises(ValueError, match="holds 2 requests"):
        company.batch.add(company.session.prefill(*guests(company)[2]))
    company.steps(3)


def test_a_prompt_that_is_too_long_is_refused_and_leaves_the_batch_as_it_was() -> None:
    company = Company(max_tokens=64)
    company.add(*guests(company)[1])
    with pytest.raises(ValueError, match="64 tokens"):
        company.batch.add(company.session.prefill(spanned(100), Dense()))
    company.session.beginnings.forget()
    company.steps(3)
    company.check_pages()


def test_tokens_must_be_one_for_each_request() -> None:
    company = Company()
    with pytest.raises(ValueError, match="0 tokens for 0 requests"):
        company.batch.step([])
    for guest in guests(company)[:2]:
        company.add(*guest)
    for tokens in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens for 2 requests"):
            company.batch.step(tokens)
    company.steps(3)


@pytest.mark.parametrize(("position", "more"), list(product([0, 1], [0, 5, 16])))
def test_a_request_at_its_end_stops_the_step_before_anything_moves(
    position: int, more: int
) -> None:
    """Wherever the request stands, and the end in a page; without it the others go on."""
    short, long = spanned(9, question=4), spanned(30, question=4)
    company = Company(max_tokens=len(long) + more)
    for prompt in (short, long) if position else (long, short):
        company.add(prompt, Dense())
    company.steps(more)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"request {position} has reached"):
            company.batch.step([1, 2])
    company.remove(position)
    company.steps(20)


@pytest.mark.parametrize("lengths", list(permutations((5, 12))))
def test_a_pool_that_is_short_of_pages_can_be_helped(lengths: tuple[int, int]) -> None:
    """`OutOfPages` moves nothing; the step works once another request has gone."""
    company = Company(page_size=8, num_pages=1 + 8 * 4 + 8 * 5)  # a page ends after 32 tokens
    for length in lengths:
        company.add(spanned(length, question=12), Dense())  # 25 tokens, and 32
    company.steps(7)
    lacking = list(company.batch.lengths)
    for _ in range(2):
        with pytest.raises(OutOfPages):
            company.batch.step([1, 2])
        assert company.batch.lengths == lacking
    company.remove(0)
    company.steps(5)
    company.check_pages()


def alone(session: Session, prefilled: Prefilled, count: int) -> list[int]:
    """The likeliest tokens, by `extend`."""
    tokens = [int(prefilled.logits.argmax())]
    while len(tokens) < count:
        logits = session.executor.extend(prefilled, torch.tensor(tokens[-1:]))
        tokens.append(int(logits[-1].argmax()))
    return tokens


@pytest.mark.parametrize("guest", range(6))
def test_generation_yields_the_likeliest_tokens(guest: int) -> None:
    company = Company()
    session, asked = company.alone, guests(company)[guest]
    wanted = alone(session, session.prefill(*asked), GREEDY.max_tokens)
    got = list(decode(session.executor, session.prefill(*asked), frozenset(), GREEDY))
    assert got == wanted
    end = wanted[10]
    cut = list(decode(session.executor, session.prefill(*asked), frozenset({end}), GREEDY))
    assert cut == wanted[: wanted.index(end) + 1]
    session.beginnings.forget()
    assert session.executor.storage.pool.num_used == 0


@pytest.mark.parametrize("taken", [0, 1, 5, 40])
def test_an_abandoned_generation_gives_all_pages_back(taken: int) -> None:
    company = Company()
    session = company.alone
    pool = session.executor.storage.pool
    prefilled = session.prefill(*guests(company)[1])
    session.beginnings.forget()
    tokens = decode(session.executor, prefilled, frozenset(), GREEDY)
    for _ in range(taken):
        next(tokens)
    assert pool.num_used >= int((prefilled.cache.table >= 0).sum())
    del tokens
    assert pool.num_used == int((prefilled.cache.table >= 0).sum())
    del prefilled
    assert pool.num_used == 0
