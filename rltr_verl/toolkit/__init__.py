"""Parts that tools are made of: an index of documents, search servers, pages, MCP servers. Open to tools of users."""
