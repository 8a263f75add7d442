"""`outlines`: types, patterns and grammars as vLLM takes them, schemas as OpenAI does."""

import json
from typing import Literal

import openai
import outlines
from asking import PERSON, PERSON_REPEATED, WEATHER, Person, print_result, urls
from outlines.types import CFG, Regex

GRAMMAR = """
?start: city
?city: "Rome" | "Oslo"
"""

_, pair = urls()
client = openai.OpenAI(base_url=f"{pair}/v1", api_key="none")
vllm = outlines.from_vllm(client, "smollm2")
plain = outlines.from_openai(client, "smollm2")
settings = {"temperature": 0, "max_tokens": 100}
forced = [vllm(WEATHER, kind, **settings) for kind in (Literal["Rome", "Oslo"], Regex("Rome|Oslo"), CFG(GRAMMAR))]
forced.append("".join(vllm.stream(WEATHER, Literal["Rome", "Oslo"], **settings)))
people = [json.loads(model(PERSON, Person, **settings)) for model in (vllm, plain)]
free = json.loads(plain(PERSON_REPEATED, dict, **settings))
print_result(forced=forced, people=people, free=free)
