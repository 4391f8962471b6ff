//! Retrieval for AI applications as one program: the HTTP API and the command line
