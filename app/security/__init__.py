"""What every request must pass, as plain ASGI middleware, WebSockets included.

From the outside in: `hosts`, the names that the console answers to (DNS rebinding) and the origin of
requests that change something (CSRF); `guard`, who asks, how often, and whether their role is enough;
`bodies`, how much they may send.
"""
