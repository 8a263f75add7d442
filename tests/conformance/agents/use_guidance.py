"""`guidance`, whose grammars reach the server as Lark: a choice, a pattern, JSON, and text of so many tokens."""

import json

from asking import HELLO, PERSON, WEATHER, Person, print_result, urls
from guidance import assistant, gen, models, select, user
from guidance import json as gen_json
from guidance.models.experimental import VLLMModel

_, pair = urls()
model = VLLMModel("smollm2", base_url=f"{pair}/v1", api_key="none", echo=False)


def ask(model, text, grammar):
    with user():
        model += text
    with assistant():
        model += grammar
    return model["answer"]


forced = [
    ask(model, WEATHER, grammar)
    for grammar in (select(["Rome", "Oslo"], name="answer"), gen("answer", regex="Rome|Oslo"))
]
limited = ask(model, HELLO, gen("answer", max_tokens=8))
openai = models.OpenAI("smollm2", base_url=f"{pair}/v1", api_key="none", echo=False)
people = [json.loads(ask(each, PERSON, gen_json("answer", schema=Person))) for each in (model, openai)]
print_result(forced=forced, hello=limited, people=people)
