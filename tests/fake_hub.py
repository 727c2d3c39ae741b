"""A hub on this machine, for one repository, and the hub library's cache as a folder that a test lays out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34


def is_large(name: str) -> bool:
    """Whether a repository keeps such a file in large file storage, where it goes by its sha256."""
    return name.endswith((".gguf", ".safetensors", ".bin"))


def checksum(name: str, content: bytes) -> str:
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()


class FakeHub:
    """`files` of `repository` by name; `stated` replaces what the hub says of them; errors are (status, code) pairs."""

    def __init__(self, repository: str = "someone/toy") -> None:
        self.repository = repository
        self.commit = COMMIT
        self.files: dict[str, bytes] = {}
        self.stated: dict[str, bytes] = {}
        self.listing: Any = None
        self.listing_error: tuple[int, str] | None = None
        self.file_error: tuple[int, str] | None = None
        self.fetched: list[str] = []
        self.num_requests = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                hub.num_requests += 1
                path = self.path.partition("?")[0]
                start = f"/{hub.repository}/resolve/main/"
                if path == f"/api/models/{hub.repository}":
                    content = json.dumps(hub.answer_listing()).encode()
                    self.respond(hub.listing_error, content, "application/json")
                elif path.startswith(start) and path.removeprefix(start) in hub.files:
                    name = path.removeprefix(start)
                    if self.command == "GET" and hub.file_error is None:
                        hub.fetched.append(name)
                    self.respond(hub.file_error, hub.files[name], checksum(name, hub.stated.get(name, hub.files[name])))
                else:
                    known = path.startswith(f"/{hub.repository}/")
                    self.respond((404, "EntryNotFound") if known else (401, "RepoNotFound"), b"", "")

            def respond(self, error: tuple[int, str] | None, content: bytes, etag: str) -> None:
                self.send_response(200 if error is None else error[0])
                if error is not None:
                    content = b""
                    self.send_header("X-Error-Code", error[1])
                else:
                    self.send_header("X-Repo-Commit", hub.commit)
                    self.send_header("ETag", f'"{etag}"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer_listing(self) -> Any:
        """What the library asks for with `model_info(…, files_metadata=True)`."""
        if self.listing is not None:
            return self.listing
        return {
            "id": self.repository,
            "sha": self.commit,
            "siblings": [self._state(name, self.stated.get(name, content)) for name, content in self.files.items()],
        }

    @staticmethod
    def _state(name: str, content: bytes) -> dict[str, Any]:
        stated: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
        if is_large(name):
            stated["lfs"] = {"size": len(content), "sha256": checksum(name, content), "pointerSize": 130}
        else:
            stated["blobId"] = checksum(name, content)
        return stated


def lay_out_cache(folder: Path, repository: str, files: Mapping[str, bytes]) -> Path:
    """Files as the hub library keeps them; returns the folder of the snapshot."""
    root = folder / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    (root / "blobs").mkdir()
    for name, content in files.items():
        blob = root / "blobs" / checksum(name, content)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return snapshot
