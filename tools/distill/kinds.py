"""Openings of messages by kind of task. The target continues them, so that the corpus has every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KINDS: Mapping[str, Sequence[str]] = {
    "mathematics": (
        "A baker", "A farmer has", "Maria buys", "There are", "A train travels", "Tom had", "If a box contains",
        "A shop sells", "In a school of", "Every week, Anna", "Solve this problem step by step:", "How many",
        "Ben and his sister", "A tank holds", "After spending", "The sum of", "Calculate", "Each day a worker",
        "What is the area of", "Find the value of x if", "A rectangle has", "The function f(x) =", "Given that",
    ),
    "code": (
        "Write a Python function that", "Complete this Python function:\n\ndef ", "def ",
        "from typing import List\n\n\ndef ", "import math\n\n\ndef ", "Write a function to",
        "What does this code do?\n\n", "Fix the bug in this code:\n\n",
        "Write a SQL query that", "Explain how to use", "Write a program in C that", "In JavaScript, how do I",
        "from typing import List, Tuple\n\n\ndef ", "Write unit tests for", "class ",
        "Implement", "Develop a program that", "Write a Python script that", "Write an HTML page that",
    ),
    "extraction": (
        "Extract the names of", "Read the following text and answer the question.", "From the text below, list",
        "Identify the named entities in", "Here is a movie review:", "Given the following data,",
        "Classify the following sentence as", "Find all dates in the following text:", "Rate the following reviews",
    ),
    "summary": (
        "Summarize the following article in three sentences.\n\n", "Summarize:", "Write a short summary of",
        "Give me the main points of this text:\n\n", "Shorten this paragraph:\n\n", "TL;DR of the following:",
        "Summarize: (CNN) -- ", "Summarize: The ", "Summarize: Police ", "Summarize: A man ", "Summarize: By ",
    ),
    "questions": (
        "What is", "Why do", "Who was", "How does", "When did", "Where is", "Explain the difference between",
        "What are the main causes of", "Describe", "Can you explain", "Which country", "What happens when",
        "List the", "Is it true that", "In which year", "Who played", "When was the", "Where does the", "who sang",
        "what is the name of", "how many", "In the field of", "Discuss", "Analyze", "What were the effects of",
    ),
    "reading": (
        "Answer the question based on the context.\n\nContext:", "Document [1]", "Use the passages below to answer:",
        "According to the following paragraph,", "Context: ", "Given these search results,",
    ),
    "writing": (
        "Write a short story about", "Write an email to", "Compose a poem about", "Draft a blog post about",
        "Imagine you are", "Write a letter", "Create a dialogue between", "Describe a character who",
        "Write a product description for", "Give me ideas for", "Draft a professional", "Write a persuasive",
        "Compose an engaging", "Write a review of",
    ),
    "roleplay": (
        "Pretend to be", "Act as", "You are a", "Assume the role of", "Imagine that you are", "Play the role of",
        "Speak like", "I want you to act as",
    ),
    "reasoning": (
        "If all", "Imagine you are", "A man", "Which of the following", "Suppose that", "Is the following statement",
        "David has", "What comes next in", "Explain why", "One morning", "Which word does not belong",
    ),
    "translation": (
        "Translate the following sentence to", "Translate German to English:", "How do you say",
        "Translate German to English: Die", "Translate German to English: Der", "Translate German to English: Das",
        "Translate German to English: Es", "Translate German to English: Wir", "Translate German to English: In",
        "Translate German to English: Ein", "Translate French to English: Le", "Translate Spanish to English: El",
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
    "Take your previous",
)  # fmt: skip
"""How a user goes on after an answer."""

DOCUMENT_TASKS: Sequence[str] = (
    "Summarize: {text}",
    "Summarize the following text in two sentences.\n\n{text}",
    "{text}\n\nWhat is the main idea of this text?",
    "Extract all names and numbers from the following text as JSON.\n\n{text}",
    "Translate the following text to French.\n\n{text}",
    "Answer the question based on the document.\n\nDocument: {text}\n\nQuestion: What",
    "Answer the question based on the document.\n\nDocument: {text}\n\nQuestion: Who",
    "Document [1](Title: Notes) {text}\n\nQuestion: How",
    "Rewrite the following text in simple words.\n\n{text}",
    "{text}\n\nList the key points.",
)
"""Tasks about a text, which is an earlier answer. One that ends in an open question is continued."""
