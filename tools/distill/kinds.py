"""Openings of messages by kind of task. The target continues them, so that the corpus has every kind.

They are our own: none is the beginning of a benchmark's prompts, on which drafts are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KINDS: Mapping[str, Sequence[str]] = {
    "mathematics": (
        "A baker", "A farmer has", "Maria buys", "There are", "A train travels", "If a box contains", "Simplify",
        "A florist sells", "In a school of", "Every week, Anna", "Solve this problem step by step:", "How many",
        "Ben and his sister", "A tank holds", "After spending", "The sum of", "Calculate", "Each day a worker",
        "What percentage of", "Solve for x:", "A rectangle has", "Prove that", "Let g(t) =", "Convert", "The price of",
    ),
    "code": (
        "Write a function in Python that", "Fill in the missing lines:\n\n```python\n", "def ", "class ", "SELECT ",
        "Finish this function:\n\n```python\ndef ", "#include <", "import pandas as pd\n", "```js\nfunction ",
        "I get this error: ", "What does this code do?\n\n", "Fix the bug in this code:\n\n",
        "Write a bash one-liner that",
        "Write a query in SQL that", "Explain how to use", "Write a program in C that", "In JavaScript, how do I",
        "Write unit tests for", "Implement", "Write a Python script that", "Write an HTML page that",
        "Write a method that takes", "Make this code faster:\n\n", "Write a docstring for this:\n\ndef ",
    ),
    "extraction": (
        "Extract the names of", "Read the following text and answer the question.", "From the text below, list",
        "Which people and places does this text name?", "Here is an order from a customer:", "Here is a log file:",
        "Sort these messages into complaints and praise:", "Find all dates in the following text:",
        "Fill in this form from the letter below.", "Label each line as",
    ),
    "summary": (
        "Summarize the text below in three sentences.\n\n", "Sum up this report:\n\n", "Write a short summary of",
        "Give me the main points of this text:\n\n", "Shorten this paragraph:\n\n", "TL;DR of the following:",
        "Write the minutes of this meeting:\n\n", "Find a headline for this text:\n\n", "What happened here?\n\n",
        "Tell me in one sentence what this letter wants:\n\nDear ",
    ),
    "questions": (
        "What is", "Why do", "Who was", "How does", "When did", "Where is", "Explain the difference between",
        "What are the main causes of", "Describe", "Could you explain", "Which country", "What happens if",
        "List the", "Is it true that", "In which year", "Who invented", "When was", "Where can I find", "Whose",
        "what's the", "how long does", "Tell me about the", "Discuss", "Analyze", "What were the effects of",
    ),
    "reading": (
        "Answer the question based on the context.\n\nContext:", "Use the passages below to answer:", "Notes:\n\n1. ",
        "According to the following paragraph,", "Context: ", "Here is a page of a manual:", "My notes say:",
    ),
    "writing": (
        "Write a story about", "Write an email to", "Compose a poem about", "Draft a blog post about",
        "Write a scene in which", "Write a letter to", "Create a dialogue between", "Describe a character who",
        "Write a product description for", "Give me ideas for", "Draft a speech for", "Write an invitation to",
        "Compose a song about", "Write a review of", "Continue this story: ",
    ),
    "roleplay": (
        "Pretend to be", "Act as", "You are a", "You play", "Let's play a game: you are", "Talk to me like",
        "Answer every question as", "I want you to act as", "Be my",
    ),
    "reasoning": (
        "If all", "You are in a room with", "A man", "Which of the following", "Suppose that",
        "Is this argument sound?", "Three neighbours", "What comes next in", "Explain why", "Last night",
        "Which of these is the odd one out:", "True or false:",
    ),
    "translation": (
        "Translate the following sentence to", "How do you say", "Put this into English:\n\n", "Say in French:",
        "What is the Spanish word for", "Translate this letter into German:\n\n", "Übersetze ins Englische: ",
        "Traduis en anglais : ", "Traduce al inglés: ", "What does this German sign mean?", "Translate into Italian:",
        "Correct the grammar of this sentence:", "Rewrite the following sentence in", "Paraphrase:",
    ),
    "advice": (
        "How can I", "I want to", "What should I do if", "Give me tips for", "My friend", "Plan a", "Help me",
        "I am looking for", "Recommend", "What is the best way to",
    ),
    "lists and data": (
        "List five", "Give me a list of", "Make a table of", "Return a JSON object with", "Convert this to JSON:",
        "Write a YAML file for", "List the steps to", "Name ten", "Write a JSON array of", "Create a checklist for",
    ),
}  # fmt: skip

SYSTEM_PROMPTS: Sequence[str] = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are an expert programmer. Answer with code.",
    "You are a patient teacher. Explain step by step.",
    "You are a customer support agent of an online shop.",
    "Answer in JSON only.",
    "You are a translator.",
    "You are a helpful assistant with access to tools. To use one, answer with a JSON object that has its name and its "
    'arguments. Tools: [{"name": "get_weather", "parameters": {"city": "string"}}, {"name": "search", "parameters": '
    '{"query": "string"}}]',
)
"""One in eight conversations has one of these instead of the target's own."""

FOLLOW_UPS: Sequence[str] = (
    "Can you", "Now", "Thanks! ", "What about", "Rewrite it", "Explain", "Give me an example of", "Why", "How",
    "Make it shorter", "Translate that", "And", "Write a", "What if", "I don't understand", "List",
    "Say that again",
)  # fmt: skip
"""How a user goes on after an answer."""

DOCUMENT_TASKS: Sequence[str] = (
    "Sum up this text: {text}",
    "Summarize the following text in two sentences.\n\n{text}",
    "{text}\n\nWhat is the main idea of this text?",
    "Extract all names and numbers from the following text as JSON.\n\n{text}",
    "Translate the following text to French.\n\n{text}",
    "Answer the question based on the document.\n\nDocument: {text}\n\nQuestion: What",
    "Answer the question based on the document.\n\nDocument: {text}\n\nQuestion: Who",
    "My notes: {text}\n\nQuestion: How",
    "Rewrite the following text in simple words.\n\n{text}",
    "{text}\n\nList the key points.",
)
"""Tasks about a text, which is an earlier answer. One that ends in an open question is continued."""
