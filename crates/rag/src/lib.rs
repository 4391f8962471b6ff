//! What is built on stores, models and providers: search, ingestion, memory, gateway
