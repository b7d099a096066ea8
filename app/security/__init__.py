"""Who may ask what. `guard`: what every request must pass, as plain ASGI middleware, WebSockets included.

From the outside in: HostGuard, the names that the console answers to (DNS rebinding) and the origin of requests that
change something (CSRF); AccessGuard, who asks, how often, and whether their role is enough; BodyLimit, how much they
may send. `access` knows the tokens, `callers` the roles, `sign_in` a provider's accounts.
"""
