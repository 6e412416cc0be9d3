"""Clients that people use, against a socket."""

import asyncio

import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.llms.openai_like import OpenAILike
from openai.types.chat import ChatCompletionMessageParam
from tests.server.conftest import Served
from tests.server.scripted import ScriptedEngine
from tests.server.templates import HERMES, bytes_with
from tests.server.test_tool_calls import CALL, TOOL

KEY = "key-of-a-client"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Since when?"}]
TEXT = ScriptedEngine().text


@pytest.fixture
def address(served: Served) -> str:
    return served(api_key=(KEY,), tokenizer=bytes_with(HERMES)) + "/v1"


def test_openai(address: str, engine: ScriptedEngine) -> None:
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert chat.choices[0].message.content == TEXT
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    completion = client.completions.create(model="tiny", prompt="Since when?", max_tokens=6)
    assert completion.choices[0].text == TEXT[:6]
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    found = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in found if one.choices) == TEXT
    assert found[-1].usage.completion_tokens == chat.usage.completion_tokens
    engine.text = CALL
    called = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    assert called.choices[0].message.tool_calls[0].function.name == "look_up"
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[TOOL]) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "look_up"


def test_openai_extras(address: str) -> None:
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    extra = {"documents": [{"text": "The bridge. " * 20, "title": "a"}], "redknot": {}}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    (segment,) = chat.redknot["segments"]
    assert (segment["title"], segment["hit"], segment["reason"]) == ("a", "none", "first sight")


def test_openai_errors_have_their_classes(address: str, engine: ScriptedEngine) -> None:
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="wrong-key").models.list()
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=0)
    assert caught.value.param == "max_tokens"
    engine.fail_after = 2
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="out of luck"):
        list(stream)
    engine.fail_after, engine.capacity = None, 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=MESSAGES)


def test_openai_async(address: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            calls = [
                client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
                for _ in range(4)
            ]
            streams = await asyncio.gather(*calls)
            return [
                "".join([one.choices[0].delta.content or "" async for one in stream])
                for stream in streams
            ]

    assert asyncio.run(ask()) == [TEXT] * 4


def test_langchain(address: str, engine: ScriptedEngine) -> None:
    chat = ChatOpenAI(model="tiny", base_url=address, api_key=KEY, max_retries=0)
    assert chat.invoke("Since when?").content == TEXT
    assert "".join(str(piece.content) for piece in chat.stream("Since when?")) == TEXT
    engine.text = CALL
    called = chat.bind_tools([TOOL]).invoke("Since when?")
    assert [call["name"] for call in called.tool_calls] == ["look_up"]


def test_llama_index(address: str) -> None:
    llm = OpenAILike(model="tiny", api_base=address, api_key=KEY, max_retries=0, is_chat_model=True)
    assert llm.complete("Since when?").text == TEXT
    pieces = [piece.delta for piece in llm.stream_complete("Since when?")]
    assert "".join(pieces) == TEXT
