"""`instructor`, which reads a model of pydantic out of JSON and out of a call that it forces."""

import instructor
import openai
from asking import PERSON, Person, print_result, urls

_, pair = urls()
client = openai.OpenAI(base_url=f"{pair}/v1", api_key="none")
people = [
    instructor.from_openai(client, mode=mode).chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": PERSON}],
        response_model=Person,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS)
]
print_result(people=people)
