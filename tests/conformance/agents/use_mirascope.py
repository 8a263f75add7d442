"""`mirascope`, by responses (its default) and by chats: tools, and answers in the modes that send a schema."""

from asking import PERSON, WEATHER, AnyPerson, Person, asked, get_weather, print_result, told, urls
from mirascope import llm

caller, pair = urls()
for scope, url in (("openai/caller", caller), ("openai/smollm2", pair)):
    llm.register_provider("openai", scope=scope, base_url=f"{url}/v1", api_key="none")
settings = {"temperature": 0, "max_tokens": 100}
weather = llm.tool(get_weather)
said = []
for mode in ("", ":completions"):

    @llm.call(f"openai/caller{mode}", tools=[weather], **settings)
    def describe():
        return WEATHER

    answer = describe()
    while answer.tool_calls:
        answer = answer.resume(answer.execute_tools())
    said.append(answer.text())
people = []
for mode in ("", ":completions"):
    for kind in ("strict", "tool"):

        @llm.call(f"openai/smollm2{mode}", format=llm.format(Person, mode=kind), **settings)
        def tell():
            return PERSON

        people.append(tell().parse())


@llm.call("openai/smollm2", format=AnyPerson, **settings)
def repeat(text):
    return text


print_result(asked=asked, said=said, people=people, told=told(lambda text: repeat(text).parse()))
