"""Who may ask what: `guard` is what every request must pass, `access` knows the tokens, `callers` the roles, `sign_in`
a provider's accounts."""
