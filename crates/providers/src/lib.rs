//! Everything reached over the network: embedding APIs and RAG backends
