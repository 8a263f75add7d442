"""`instructor`, which reads a model of pydantic out of JSON."""

import instructor
import openai
from asking import PERSON, Person, print_result, urls

_, pair = urls()
client = instructor.from_openai(openai.OpenAI(base_url=f"{pair}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
person = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": PERSON}],
    response_model=Person,
    temperature=0,
    max_tokens=100,
    max_retries=0,
)
print_result(people=[person])
