"""Openings of user messages by kind of task. The target continues them, so that the corpus has every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KINDS: Mapping[str, Sequence[str]] = {
    "mathematics": (
        "A baker", "A farmer has", "Maria buys", "There are", "A train travels", "Tom had", "If a box contains",
        "A shop sells", "In a school of", "Every week, Anna", "Solve this problem step by step:", "How many",
        "Ben and his sister", "A tank holds", "After spending", "The sum of", "Calculate", "Each day a worker",
    ),
    "code": (
        "Write a Python function that", "Complete this Python function:\n\ndef ", "def ",
        "from typing import List\n\n\ndef ", "import math\n\n\ndef ", "Write a function to",
        "What does this code do?\n\n", "Fix the bug in this code:\n\n",
        "Write a SQL query that", "Explain how to use", "Write a program in C that", "In JavaScript, how do I",
        "from typing import List, Tuple\n\n\ndef ", "Write unit tests for", "class ",
    ),
    "extraction": (
        "Extract the names of", "Read the following text and answer the question.", "From the text below, list",
        "Identify the named entities in", "Here is a movie review:", "Given the following data,",
        "Classify the following sentence as", "Find all dates in the following text:",
    ),
    "summary": (
        "Summarize the following article in three sentences.\n\n", "Summarize:", "Write a short summary of",
        "Give me the main points of this text:\n\n", "Shorten this paragraph:\n\n", "TL;DR of the following:",
    ),
    "questions": (
        "What is", "Why do", "Who was", "How does", "When did", "Where is", "Explain the difference between",
        "What are the main causes of", "Describe", "Can you explain", "Which country", "What happens when",
        "List the", "Is it true that", "In which year",
    ),
    "reading": (
        "Answer the question based on the context.\n\nContext:", "Document [1]", "Use the passages below to answer:",
        "According to the following paragraph,", "Context: ", "Given these search results,",
    ),
    "writing": (
        "Write a short story about", "Write an email to", "Compose a poem about", "Draft a blog post about",
        "Imagine you are", "Write a letter", "Create a dialogue between", "Describe a character who",
        "Write a product description for", "Give me ideas for",
    ),
    "translation": (
        "Translate the following sentence to", "Translate German to English:", "How do you say",
        "Correct the grammar of this sentence:", "Rewrite the following sentence in", "Paraphrase:",
    ),
    "advice": (
        "How can I", "I want to", "What should I do if", "Give me tips for", "My friend", "Plan a", "Help me",
        "I am looking for", "Recommend", "What is the best way to",
    ),
}  # fmt: skip
