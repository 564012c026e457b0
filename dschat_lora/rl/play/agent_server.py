"""The address at which agents ask the actor: OpenAI's interface, with a path for each episode."""

import threading
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dschat_lora.endpoint.answers import AnswerResponse, Kind, RequestAnswers
from dschat_lora.endpoint.guard import ApiError, invalid, read_json
from dschat_lora.endpoint.http_server import HttpServer, make_app
from dschat_lora.endpoint.requests import parsed_request
from dschat_lora.endpoint.sockets import address_of, listen
from dschat_lora.rl.play.agent_programs import CALL_NUMBER, MODEL_NAME, reward_and_metrics
from dschat_lora.rl.play.agents import OVER, AgentModel, Agents, Episode

HOST = "127.0.0.1"


class AgentServer:
    """Serves the episodes of :class:`Agents` in a thread, on a free port of this machine alone.

    Attributes:
        address: of the server, without a slash at its end.
    """

    def __init__(self, agents: Agents) -> None:
        """Start to listen."""
        self._agents = agents
        self.temperature, self.top_p, self.top_k = 1.0, 1.0, 0  # which the options of the run say
        self.max_new_tokens = agents.max_new_tokens
        listening = listen(HOST, 0)
        self.address = address_of(listening)
        # A program may think in between.
        self._server = HttpServer(
            make_app(self._routes(), host=HOST, token=None), backlog=4096, timeout_keep_alive=3600
        )
        serve = partial(self._server.run, sockets=[listening])
        self._thread = threading.Thread(target=serve, name="agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the end of open connections for a moment."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)

    def _routes(self) -> list[Route]:
        base = "/{episode}/v1"
        return [
            Route(f"{base}/chat/completions", partial(self._answer, kind="chat"), methods=["POST"]),
            Route(f"{base}/completions", partial(self._answer, kind="text"), methods=["POST"]),
            Route(f"{base}/models", self._models),
            Route("/{episode}/reward", self._reward, methods=["POST"]),
        ]

    def _episode(self, request: Request) -> Episode:
        episode = self._agents.episodes.get(request.path_params["episode"])
        if episode is None or episode.is_over:
            raise ApiError(404, OVER, code="episode_over")
        return episode

    async def _answer(self, request: Request, kind: Kind) -> Response:
        number = request.headers.get(CALL_NUMBER, "")
        model = AgentModel(
            self._episode(request),
            self._agents.to,
            int(number) if number.isdecimal() and len(number) < 20 else 0,
        )
        body = await read_json(request)
        if isinstance(body, dict):
            body["model"] = MODEL_NAME  # whatever a program calls it
            # A program may ask for more than this model has room for.
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(body.get(name), int) and body[name] > model.limit:
                    body[name] = model.limit
        asked = await parsed_request(body, kind, {MODEL_NAME: model}, self, self._agents.changed)
        return AnswerResponse(RequestAnswers(asked, self._agents), kind)

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        entry = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "dschat_lora"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _reward(self, request: Request) -> Response:
        episode, body = self._episode(request), await read_json(request)
        try:
            reward_and_metrics(body)
        except ValueError as error:
            raise invalid(str(error)) from error
        episode.posted = body
        return JSONResponse({}, status_code=201)
