"""`chatlas`, by responses (its default) and by chats: a tool, and data by a schema."""

from asking import PERSON, WEATHER, Person, asked, get_weather, print_result, urls
from chatlas import ChatOpenAI, ChatOpenAICompletions

caller, pair = urls()


def chat(kind, name, url):
    it = kind(model=name, base_url=f"{url}/v1", api_key="none")
    it.set_model_params(temperature=0, max_tokens=100)
    return it


said, people = [], []
for kind in (ChatOpenAI, ChatOpenAICompletions):
    for stream in (False, True):
        agent = chat(kind, "caller", caller)
        agent.register_tool(get_weather)
        agent.chat(WEATHER, echo="none", stream=stream)
        said.append(agent.get_last_turn().text)
    people.append(chat(kind, "smollm2", pair).chat_structured(PERSON, data_model=Person))
print_result(asked=asked, said=said, people=people)
