"""The Content-Security-Policy of the suite's pages, without pytest: every process that a test starts imports this."""

POLICY = "default-src 'self'"


def strict_content_security_policy(get_response):
    """Middleware: the strictest policy that a project may set."""

    def respond(request):
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return respond
