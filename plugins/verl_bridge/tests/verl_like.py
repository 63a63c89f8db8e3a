"""A tool and a user with the methods of verl's, for processes without verl; `class_name` of the tests' files."""

from verl_like_schemas import ToolResponse


def shown(answer):
    """Images and videos of a response."""
    from PIL import Image

    red, blue = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    images = {"two images": [red, None, blue], "one image": red, "no image": ["a"]}
    return images.get(answer), ["a"] if answer == "video" else None


class CountingTool:
    """Counts its calls, as verl's documentation writes a tool."""

    instances: dict[str, dict] = {}  # noqa: RUF012 - the tests look at it

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        print(tool_schema.model_dump(exclude_unset=True))  # as verl's base class does

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.instances[instance_id] = {"calls": 0, "ground_truth": ground_truth, "kwargs": kwargs}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        state = self.instances[instance_id]
        state["calls"] += 1
        if parameters.get("answer") == "raise":
            raise RuntimeError("no such answer")
        if parameters.get("answer") == "lie":
            return "no tuple"
        text = f"{self.name}: call {state['calls']} of {state['ground_truth']}"
        images, videos = shown(parameters.get("answer"))
        return ToolResponse(text=text, image=images, video=videos), 0.5, {"seen": 1, "note": "text"}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.instances[instance_id]["calls"])

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]


class OldTool(CountingTool):
    """Returns an id and texts, as verl 0.5 did, and describes itself."""

    def __init__(self, config, tool_schema=None):
        assert tool_schema is None
        self.name = "old"

    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "old", "parameters": {"type": "object", "properties": {}}}}

    async def create(self, instance_id, **kwargs):
        await super().create(instance_id)
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        response, reward, metrics = await super().execute(instance_id, parameters)
        return response.text, reward, metrics


class RiddleInteraction:
    """Wants to hear the ground truth."""

    finalized: list[str] = []  # noqa: RUF012 - the tests look at it

    def __init__(self, config):
        self.config, self.asked = config, {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.asked[instance_id] = (ground_truth, kwargs.get("hint", "none"))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        truth, hint = self.asked[instance_id]
        right = messages[-1]["content"] == truth
        return right, "Right." if right else f"Wrong. Hint: {hint}", 1.0 if right else 0.0, {}

    async def finalize_interaction(self, instance_id):
        self.finalized.append(self.asked.pop(instance_id)[0])


class BareInteraction(RiddleInteraction):
    """Ends without an argument, as verl's base class does."""

    async def finalize_interaction(self):
        self.finalized.append("bare")
