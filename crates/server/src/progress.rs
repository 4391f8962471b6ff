//! Progress of downloads: a bar in a terminal, plain lines elsewhere.
