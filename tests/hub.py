"""A small Hub on loopback, for the real client huggingface_hub. It has repositories with commits,
branches, restricted access and pushes, and can fail like a network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


@dataclass
class Repository:
    """A repository: its commits by id, in order, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # only requests with TOKEN may read it
    private: bool = False
    card: dict[str, Any] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make the files the newest commit of a branch. Returns its id."""
        text = repr((len(self.commits), sorted(files))).encode()
        name = hashlib.sha1(text).hexdigest()
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name


class SmallHub:
    """The server. `requests` has one line for each request, such as "GET /a/b/resolve/…"."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # by names such as "models/ORG/NAME"
        self.requests: list[str] = []
        self.cut: set[str] = set()  # files of which only half is sent
        self.objects: dict[str, bytes] = {}  # files that were uploaded by LFS
        self.refuse_commits = False
        self.has_sizes = True  # whether the list of files contains sizes
        hub = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.hub = hub
                super().setup()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], kind: str = "model", **more: Any) -> str:
        """Add a repository with one commit on the branch main. Returns the commit."""
        repository = self.repositories[f"{kind}s/{name}"] = Repository(**more)
        return repository.commit(files)

    def environ(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a program that uses only this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN_PATH": str(home / "no token"),
            **more,
        }

    def downloads(self, name: str = "") -> list[str]:
        """The files that were sent. A file that was sent twice is listed twice."""
        return [
            line[4:] for line in self.requests if f"GET /{name}" in line and "/resolve/" in line
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextlib.contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    try:
        yield hub
    finally:
        hub.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a folder as the files of a commit."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = path.strip("/").split("/")
        if method == "POST":
            self._post(parts, body)
        elif method == "PUT":
            self.hub.objects[parts[-1]] = body
            self._send(200, b"")
        elif parts[0] == "api":
            self._info(parts[1], "/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[1:] if kind == "datasets" else parts
            self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:]), method)

    def _repository(self, kind: str, name: str) -> Repository | None:
        """The repository, if the request may read it. Otherwise sends the refusal and returns
        None."""
        found = self.hub.repositories.get(f"{kind}/{name}")
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not has_token):
            self._fail(404 if has_token else 401, "RepoNotFound")
        elif found.gated and not has_token:
            self._fail(401, "GatedRepo")
        else:
            return found
        return None

    def _info(self, kind: str, name: str, revision: str) -> None:
        repository = self._repository(kind, name)
        if repository is None:
            return
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._fail(404, "RevisionNotFound")
            return
        files = repository.commits[commit]
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in files]
        for each in siblings if self.hub.has_sizes else ():
            each["size"] = len(files[each["rfilename"]])
        content = {"id": name, "sha": commit, "siblings": siblings, "private": repository.private}
        self._json({**content, "cardData": repository.card, "tags": [], "downloads": 0, "likes": 0})

    def _file(self, kind: str, name: str, revision: str, path: str, method: str) -> None:
        repository = self._repository(kind, name)
        if repository is None:
            return
        commit = repository.branches.get(revision, revision)
        text = repository.commits.get(commit, {}).get(path)
        if text is None:
            self._fail(404, "EntryNotFound")
            return
        etag = hashlib.sha256(text).hexdigest()
        start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(text) - 1}/{len(text)}")
            text = text[start:]
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if method == "GET":
            cut = path in self.hub.cut
            self.wfile.write(text[: len(text) // 2] if cut else text)
            self.close_connection = cut

    def _post(self, parts: list[str], body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "")
        elif parts == ["api", "repos", "create"]:
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            private = given.get("private", given.get("visibility") == "private")
            known = self.hub.repositories
            if f"models/{name}" in known:
                self._json({"url": f"{self.hub.url}/{name}"}, 409)
                return
            known[f"models/{name}"] = Repository(private=bool(private))
            known[f"models/{name}"].commit({})
            self._json({"url": f"{self.hub.url}/{name}"})
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            wanted = json.loads(body)["objects"]
            for each in wanted:
                each["actions"] = {"upload": {"href": f"{self.hub.url}/upload/{each['oid']}"}}
            self._json({"transfer": "basic", "objects": wanted})
        elif parts[4] == "preupload":
            self._json({"files": [_mode(each) for each in json.loads(body)["files"]]})
        elif parts[4] == "commit":
            self._commit("/".join(parts[2:4]), body)

    def _commit(self, name: str, body: bytes) -> None:
        if self.hub.refuse_commits:
            self._fail(500, "")
            return
        repository = self.hub.repositories[f"models/{name}"]
        files = dict(repository.commits[repository.branches["main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        commit = repository.commit(files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _json(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self._send(status, text, {"Content-Type": "application/json"})

    def _send(self, status: int, text: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


def _mode(file: Mapping[str, Any]) -> dict[str, Any]:
    is_large = file["path"].endswith(".safetensors")
    mode = "lfs" if is_large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def use_hub(hub: SmallHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub use this hub in this process, in which it has already read the
    environment."""
    from huggingface_hub import constants

    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "no token"),
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("GSPO_HUB_COMMITS", "")
