"""A server that speaks the hub's protocol: what downloads and uploads ask for."""

import base64
import hashlib
import http.server
import json
import re

COMMIT = "a" * 40


class Handler(http.server.BaseHTTPRequestHandler):
    """The parts of the hub that a download needs: what a repository holds, and its files."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server.hub
        hub.asked.append((self.command, self.path))
        api = re.fullmatch(
            r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/?]+))?(\?.*)?", self.path
        )
        file = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", self.path)
        if self.path in hub.redirects:
            self.send_response(302)
            self.send_header("Location", hub.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        plain = hub.web.get(self.path)
        if plain is not None:
            self.give(plain, {"ETag": f'"{hashlib.sha256(plain).hexdigest()}"'})
            return
        found = api or file
        if not found:
            self.refuse(404, "")
            return
        repo = hub.repositories.get(found[1])
        if found[1] in hub.private and "Bearer secret" not in self.headers.get("Authorization", ""):
            self.refuse(hub.private[found[1]][0], hub.private[found[1]][1])
            return
        if repo is None:
            self.refuse(401, "RepoNotFound")
            return
        if (api[3] if api else file[2]) not in (None, "main", COMMIT):
            self.refuse(404, "RevisionNotFound")
            return
        if api and api[2] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in repo.items()
            ]
            self.give(json.dumps(tree).encode())
            return
        if api:
            siblings = [{"rfilename": name} for name in repo]
            about = {"_id": "1", "id": found[1], "sha": COMMIT, "siblings": siblings}
            self.give(json.dumps(about).encode())
            return
        data = repo.get(file[3])
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        mark = hashlib.sha256(data).hexdigest()
        self.give(data, {"ETag": f'"{mark}"', "X-Repo-Commit": COMMIT})
        return

    def do_POST(self):
        """What an upload needs: a new repository, how its files are sent, and the commit of them."""
        hub, body = self.server.hub, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.asked.append((self.command, self.path))
        if self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
            return
        if "Bearer secret" not in self.headers.get("Authorization", ""):
            self.refuse(401, "")
            return
        if self.path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said['organization']}/{said['name']}"
            status = 409 if name in hub.repositories else 200
            if status == 200:
                hub.repositories[name], hub.visibility[name] = {}, said.get("visibility")
            self.answer({"url": f"{hub.address}/{name}"}, status)
        elif re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": modes})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer({"objects": objects, "transfer": "basic"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            repository = hub.repositories[found[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    repository[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repository[value["path"]] = hub.large[value["oid"]]
            where = f"{hub.address}/{found[1]}/commit/{COMMIT}"
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": where})
        else:
            self.refuse(404, "")

    def do_PUT(self):
        length = self.headers.get("Content-Length")
        data = self.rfile.read(int(length)) if length else self.chunks()
        self.server.hub.large[self.path.rpartition("/")[2]] = data
        self.give(b"")

    def chunks(self):
        """A body of chunks, as a client sends one whose size it does not say."""
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def give(self, data, headers=None):
        headers = headers or {}
        if self.headers.get("If-None-Match") and self.headers["If-None-Match"] == headers.get(
            "ETag"
        ):
            self.refuse(304, "")
            return
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if first else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command != "HEAD":
            cut = self.server.hub.cut
            self.wfile.write(data[first:] if cut is None else data[first : first + cut])
            self.close_connection = cut is not None

    def refuse(self, code, why):
        self.send_response(code)
        if why:
            self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Hub:
    """What the server has, and what it was asked."""

    def __init__(self):
        self.repositories, self.private, self.web, self.asked, self.cut = {}, {}, {}, [], None
        self.large, self.visibility, self.redirects = {}, {}, {}
