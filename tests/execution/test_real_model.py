"""The default policy on twelve prompts of the embedded model, against a margin."""

import json
import statistics
from itertools import permutations
from pathlib import Path

import pytest

from redknot.cli.demo import _documents
from redknot.evaluation.compare import Comparison, compare
from redknot.execution.session import Session
from redknot.models import load_model
from redknot.recovery.policies import Dense, QuestionDrop, Reuse

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "fidelity_embedded.jsonl"
QUESTIONS = (
    "Who is the owner of the bakery?",
    "When was the bakery opened?",
    "What is the name of the ferry?",
    "How many cars does the ferry carry?",
    "Who runs the harbour?",
    "How long is the breakwater?",
    "Who is the keeper of the lighthouse?",
    "How high is the tower of the lighthouse?",
    "Where does the observatory stand?",
    "When was the observatory built?",
    "Who is the head teacher of the school?",
    "How many pupils does the school have?",
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def compared() -> list[list[Comparison]]:
    """Dense, plain reuse and the default policy on each prompt."""
    session, documents = Session(load_model("embedded")), _documents()
    orders = list(permutations(range(len(documents)), 3))[:: 120 // len(QUESTIONS)]
    found = []
    for question, order in zip(QUESTIONS, orders, strict=True):
        prompt = session.tokeniser.prompt([documents[index] for index in order], question)
        found.append(compare(session, prompt, [Dense(), Reuse(), QuestionDrop()], None, 16))
    return found


def test_the_default_stays_within_four_standard_errors_of_its_measured_agreement(
    compared: list[list[Comparison]],
) -> None:
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    measured = [one["agreement"] for one in records if one["policy"] == QuestionDrop().describe()]
    error = statistics.stdev(measured) / len(QUESTIONS) ** 0.5
    agreement = statistics.mean(policy.agreement for _, _, policy in compared)
    assert agreement >= statistics.mean(measured) - 4 * error


def test_the_default_is_nearer_to_dense_than_plain_reuse(
    compared: list[list[Comparison]],
) -> None:
    """It was on every one of the recorded prompts; here on average."""
    plain = statistics.mean(reuse.kl for _, reuse, _ in compared)
    assert statistics.mean(policy.kl for _, _, policy in compared) < plain


def test_the_default_spends_less_than_a_third_of_dense(
    compared: list[list[Comparison]],
) -> None:
    assert all(policy.flops_share < 1 / 3 for _, _, policy in compared)
