"""The HTTP server of the agents: routes, keys, limits, and the delivery of replies."""

from turnwise_gateway.server.gateway_server import GatewayServer
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.session_directory import SessionDirectory

__all__ = ["GatewayServer", "ServerOptions", "SessionDirectory"]
