"""The tool `search`: BM25 over local documents, or a retrieval service."""

from __future__ import annotations

import heapq
import json
import math
import re
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.config.schema import AgentConfig
from lightrl.errors import UserError
from lightrl.rollout.tools.base import Tool, ToolError, definition_of

_WORD = re.compile(r"\w+")
_LARGEST = 4 << 20  # bytes of a service's answer


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of a corpus."""

    text: str
    title: str = ""
    id: str = ""

    def __str__(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


class BM25:
    """Okapi BM25 (Robertson and Zaragoza 2009) with the idf that is never negative, over lower-case words.

    score(q, d) = sum over words of q: log(1 + (N - n + 0.5) / (n + 0.5)) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean)),
    n documents of N hold the word, d holds it f times.
    """

    def __init__(self, documents: Sequence[Document], *, k1: float = 1.5, b: float = 0.75) -> None:
        self.documents = list(documents)
        self._k1, self._b = k1, b
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = []
        for number, document in enumerate(self.documents):
            words = _words(str(document))
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._places[word].append((number, count))
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)

    def search(self, query: str, k: int) -> list[tuple[float, Document]]:
        """The `k` best of those that hold a word of the query, best first; equals in the order of the corpus.

        >>> [d.id for _, d in BM25([Document(text="a cat", id="1"), Document(text="a dog", id="2")]).search("dog", 2)]
        ['2']
        """
        scores: dict[int, float] = defaultdict(float)
        total = len(self.documents)
        for word in _words(query):
            places = self._places.get(word, ())
            weight = math.log(1 + (total - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                norm = self._k1 * (1 - self._b + self._b * self._lengths[number] / self._mean)
                scores[number] += weight * count * (self._k1 + 1) / (count + norm)
        best = heapq.nsmallest(k, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(score, self.documents[number]) for number, score in best]


def search_tool(config: AgentConfig) -> Tool:
    """UserError for a corpus that cannot be read."""
    if config.search_url is not None:
        url = config.search_url

        def find(query: str) -> list[Any]:
            return ask(url, query, config.search_top_k, config.tool_timeout)

    else:
        assert config.search_corpus is not None
        index = BM25(read_corpus(config.search_corpus))

        def find(query: str) -> list[Any]:
            return [document for _, document in index.search(query, config.search_top_k)]

    def search(query: str) -> str:
        """Search the documents for a few words and return the best passages."""
        found = find(query)
        return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(found, start=1)) or "(nothing found)"

    return Tool(definition=definition_of(search), function=search)


def read_corpus(path: str) -> list[Document]:
    """Documents of a jsonl file. UserError with file:line."""
    documents = []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"agent.search_corpus: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"agent.search_corpus: {path}:{number}: not JSON ({error})") from error
        text = (row.get("text") or row.get("contents")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(f"agent.search_corpus: {path}:{number}: a document needs a string 'text' (or 'contents')")
        documents.append(Document(text=text, title=str(row.get("title") or ""), id=str(row.get("id", number))))
    if not documents:
        raise UserError(f"agent.search_corpus: {path} holds no documents")
    return documents


def ask(url: str, query: str, k: int, timeout: float) -> list[str]:
    """Passages from a service that speaks as Search-R1's: `{"queries", "topk", "return_scores"}` in; out, under
    `result`, for each query a list of documents or of `{"document": …, "score": …}`. ToolError for anything else."""
    body = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            data = reply.read(_LARGEST + 1)
    except TimeoutError as error:
        raise ToolError("the search service did not answer in time", "timeout") from error
    except (OSError, urllib.error.URLError, ValueError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise ToolError("the search service did not answer in time", "timeout") from error
        raise ToolError(f"the search service failed: {error}"[:300]) from error
    if len(data) > _LARGEST:
        raise ToolError("the search service sent more than it may", "output")
    try:
        found = json.loads(data)["result"][0]
        return [_passage(item) for item in found][:k]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ToolError(f"the search service's answer cannot be read: {type(error).__name__}") from error


def _passage(item: Any) -> str:
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, str):
        return document
    text = document.get("contents") or document.get("text")
    if not isinstance(text, str):
        raise TypeError("no text")
    return f"{document['title']}\n{text}" if document.get("title") else text


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
