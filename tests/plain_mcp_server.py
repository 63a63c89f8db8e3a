"""A server of the Model Context Protocol without its SDK, which takes over a second to import: for many short runs."""

import json
import sys

NO_ARGUMENTS = {"type": "object", "properties": {}}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": "add_note", "description": "Keeps a note.", "inputSchema": TEXT},
    {"name": "describe", "description": "Returns what the server is.", "inputSchema": NO_ARGUMENTS},
]
RESULTS = {
    "ping": {},
    "prompts/list": {"prompts": []},
    "resources/list": {"resources": []},
    "resources/templates/list": {"resourceTemplates": []},
    "tools/list": {"tools": TOOLS},
    "tools/call": {"content": [{"type": "text", "text": "1 notes"}]},
}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method, answer = request.get("method"), {"jsonrpc": "2.0", "id": request["id"]}
    if method == "initialize":
        capabilities = {"prompts": {}, "resources": {}, "tools": {}}
        info = {"name": "plain", "version": "1"}
        version = request["params"]["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
    elif method in RESULTS:
        answer["result"] = RESULTS[method]
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(answer), flush=True)
