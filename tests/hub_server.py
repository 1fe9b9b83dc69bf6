"""A stand-in of the Hub's HTTP API on the loopback, as much of it as pushing a folder and loading it again need."""

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_stand_in"
USER = "me"


class Hub(ThreadingHTTPServer):
    """Repositories as ``{repo id: {path: bytes}}``; used as a context manager, ``url`` is its address.

    ``created`` has what each repository was asked for with, ``commits`` (repo id, branch, message) of each upload.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.created, self.commits, self.blobs, self.requests = {}, {}, [], {}, []

    def environment(self, home, **more):
        """Variables of a process for which this is the Hub."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        direct = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        return {**kept, **own, **direct, **more}

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content=None, status=200, headers=()):
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self):
        hub, path = self.server, self.path.split("?")[0].strip("/")
        hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("lfs/"):  # signed addresses carry no token
            hub.blobs[path.removeprefix("lfs/")] = body
            return self.answer()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "api/whoami-v2":
            return self.answer({"name": USER, "type": "user", "orgs": []})
        if path == "api/repos/create":
            asked = json.loads(body)
            if asked.get("organization") not in (None, USER):
                return self.answer({"error": f"{USER} has no rights in {asked['organization']}"}, 403)
            name = f"{USER}/{asked['name']}"
            hub.created.setdefault(name, asked)
            hub.repos.setdefault(name, {})
            return self.answer({"url": f"{hub.url}/{name}", "id": "1", "name": name})
        if path == "api/validate-yaml":  # a card's metadata
            try:
                metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
                errors = [] if isinstance(metadata, dict) else [{"message": "no metadata"}]
            except (yaml.YAMLError, IndexError) as error:
                errors = [{"message": str(error)}]
            return self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        parts = path.split("/")
        if path.startswith("api/models/"):
            return self.models("/".join(parts[2:4]), parts[4:], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}} for o in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if len(parts) > 3 and parts[2] == "resolve":
            return self.file("/".join(parts[:2]), "/".join(parts[4:]))
        return self.answer({"error": f"the stand-in has no {self.command} {path}"}, 404)

    def models(self, repo, action, body):
        hub = self.server
        if repo not in hub.repos:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        files = hub.repos[repo]
        if action and action[0] == "tree":  # asked for folders only, and there are none
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        if not action or action[0] == "revision":
            listed = [{"rfilename": name} for name in files]
            return self.answer({"id": repo, "sha": "0" * 40, "siblings": listed, "tags": [], "private": False})
        if action[0] == "preupload":
            wanted = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in wanted
            ]
            return self.answer({"files": modes})
        if action[0] == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append((repo, action[1], value["summary"]))
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.blobs[value["oid"]]
            return self.answer({"commitUrl": f"{hub.url}/{repo}/commit/0", "commitOid": "0" * 40, "commitMessage": ""})
        return self.answer({"error": f"the stand-in has no {action}"}, 404)

    def file(self, repo, name):
        files = self.server.repos.get(repo, {})
        if name not in files:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(files[name]).hexdigest()
        return self.answer(files[name], headers={"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40})

    do_GET = do_POST = do_PUT = do_HEAD = handle_request
