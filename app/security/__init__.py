"""Who may ask what: `guard` is what every request must pass; `access` has roles, sign-in, tokens, limits and the audit
log.
"""
