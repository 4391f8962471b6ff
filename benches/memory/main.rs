//! Agent memory measured from outside: the rate of saves while they are embedded, retrieval over
//! large memories, and what context injection adds to a chat.
//!
//! `cargo bench -p ragstone --bench memory [-- saves | retrieval | injection]`
//!
//! The provider is a stub in this process, so its work and that of the client compete with the
//! server for the processor.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod client;
mod program;
mod stub;

use std::time::{Duration, Instant};

use client::{Connection, Latencies};
use program::Program;
use serde_json::{Value, json};
use stub::Stub;

const WIDTH: usize = 384;

#[tokio::main]
async fn main() {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|arg| arg == name);
    if is_wanted("saves") {
        saves().await;
    }
    if is_wanted("retrieval") {
        retrieval().await;
    }
    if is_wanted("injection") {
        injection().await;
    }
}

fn remote_config(stub: &Stub) -> String {
    format!(
        "providers: {{stub: {{type: openai, apiKey: bench-key, baseUrl: \"{}\"}}}}\n\
         embedding: {{providerID: stub, model: stub, dimensions: {WIDTH}, rag: {{enabled: true}}}}\n",
        stub.url()
    )
}

fn observation(n: usize) -> Value {
    json!({"session_key": format!("s{}", n % 100), "content": format!("observation {n}: the user asked about topic {} and liked it", n % 977)})
}

/// Saves at a fixed rate, whatever the answers take, for ten seconds.
async fn saves() {
    const RATE: usize = 10_000;
    const SECONDS: usize = 10;
    const CONNECTIONS: usize = 256;
    let stub = Stub::start(Duration::from_millis(50)).await;
    let program = Program::serve(&remote_config(&stub), &["--no-embeddings"]).await;
    let start = Instant::now() + Duration::from_millis(100);
    let workers = (0..CONNECTIONS).map(|worker| {
        let address = program.address;
        tokio::spawn(async move {
            let mut connection = Connection::open(address).await;
            let mut latencies = Latencies::default();
            let mut worst = [0.0f64; SECONDS];
            for n in (worker..RATE * SECONDS).step_by(CONNECTIONS) {
                let due = start + Duration::from_secs_f64(n as f64 / RATE as f64);
                tokio::time::sleep_until(due.into()).await;
                let answer = connection.post("/memory/observations", &observation(n)).await;
                assert_eq!(answer.status, 200, "{}", answer.body);
                // From when it should have been sent, so that a stall counts for all it delays.
                let took = due.elapsed();
                latencies.add(took);
                worst[n / RATE] = worst[n / RATE].max(took.as_secs_f64() * 1e3);
            }
            (latencies, worst)
        })
    });
    let mut latencies = Latencies::default();
    let mut worst = [0.0f64; SECONDS];
    for worker in futures::future::join_all(workers).await {
        let (its_latencies, its_worst) = worker.expect("a worker ends");
        latencies.merge(its_latencies);
        worst.iter_mut().zip(its_worst).for_each(|(a, b)| *a = a.max(b));
    }
    let took = start.elapsed();
    let saved = RATE * SECONDS;
    println!(
        "saves: {saved} in {:.1} s ({:.0}/s wanted {RATE}/s)",
        took.as_secs_f64(),
        saved as f64 / took.as_secs_f64()
    );
    println!("  save {latencies}");
    println!("  worst of each second, in ms: {worst:.0?}");
    println!(
        "  memory of the server when the last save was answered: {} MB",
        program.memory_mb()
    );
    let drained = program.until_embedded(saved as u64).await;
    println!(
        "  all embedded {:.1} s after the last save; memory {} MB",
        drained.as_secs_f64(),
        program.memory_mb()
    );
    let (calls, texts) = stub.counts();
    println!(
        "  {calls} calls for {texts} texts: {:.1} a call",
        texts as f64 / calls as f64
    );
    assert_eq!(texts, saved, "every text is embedded once");
}

async fn retrieval() {
    const EACH: usize = 50_000;
    let stub = Stub::start(Duration::ZERO).await;
    let program = Program::serve(&remote_config(&stub), &["--no-embeddings"]).await;
    fill(&program, EACH).await;
    program.until_embedded(4 * EACH as u64).await;
    let mut connection = Connection::open(program.address).await;
    let queries: Vec<Value> = (0..300)
        .map(|n| json!({"query": format!("which topic {n} did the user like?")}))
        .collect();
    for with_session in [false, true] {
        let mut latencies = Latencies::default();
        // The first pass embeds the queries; the second finds their vectors in the cache.
        for pass in 0..2 {
            for query in &queries {
                let mut query = query.clone();
                if with_session {
                    query["session_key"] = json!("s7");
                }
                let start = Instant::now();
                let answer = connection.post("/rag/retrieve", &query).await;
                assert_eq!(answer.status, 200, "{}", answer.body);
                if pass == 1 {
                    latencies.add(start.elapsed());
                }
            }
        }
        let scope = if with_session {
            "one session"
        } else {
            "all sessions"
        };
        println!("retrieval over 4 x {EACH} entries, {scope}, query vector cached: {latencies}");
    }
    println!("  memory of the server {} MB", program.memory_mb());
}

async fn fill(program: &Program, each: usize) {
    const CONNECTIONS: usize = 64;
    let workers = (0..CONNECTIONS).map(|worker| {
        let address = program.address;
        tokio::spawn(async move {
            let mut connection = Connection::open(address).await;
            for n in (worker..4 * each).step_by(CONNECTIONS) {
                let (route, body) = match n % 4 {
                    0 => ("/memory/observations", observation(n)),
                    1 => ("/memory/reflections", observation(n)),
                    2 => ("/memory/learnings", json!({"trigger": format!("topic {n}"), "fix": format!("answer {n}")})),
                    _ => ("/memory/knowledge", json!({"key": format!("k{n}"), "content": format!("fact {n} about topic {}", n % 977)})),
                };
                let answer = connection.post(route, &body).await;
                assert_eq!(answer.status, 200, "{}", answer.body);
            }
        })
    });
    for worker in futures::future::join_all(workers).await {
        worker.expect("a worker ends");
    }
}

/// The same chats with and without context, in turns, so that both see the same machine.
async fn injection() {
    const CHATS: usize = 400;
    Program::pull_default_model();
    let stub = Stub::start(Duration::ZERO).await;
    let config = |enabled: bool| {
        format!(
            "providers: {{stub: {{type: openai, apiKey: bench-key, baseUrl: \"{}\"}}}}\n\
             embedding: {{provider: in-process, model: minilm, rag: {{enabled: {enabled}}}}}\n\
             chat: {{providerID: stub, model: stub}}\n",
            stub.url()
        )
    };
    let models = "embeddings: [{id: minilm, path: sentence-transformers/all-MiniLM-L6-v2}]";
    let with = Program::serve_with_models(&config(true), models).await;
    let without = Program::serve_with_models(&config(false), models).await;
    fill(&with, 500).await;
    with.until_embedded(2000).await;
    let mut connections = [
        Connection::open(without.address).await,
        Connection::open(with.address).await,
    ];
    let mut latencies = [Latencies::default(), Latencies::default()];
    for n in 0..CHATS {
        let chat = json!({"messages": [{"role": "user", "content": format!("What do we know about topic {n}, please?")}]});
        for (connection, latencies) in connections.iter_mut().zip(&mut latencies) {
            let start = Instant::now();
            let answer = connection.post("/v1/chat/completions", &chat).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            latencies.add(start.elapsed());
        }
    }
    assert!(
        stub.last_chat().contains("Semantic Context (RAG)"),
        "the context is there"
    );
    let [without, with] = latencies;
    println!("chat without context: {without}");
    println!("chat with context, embedding the question in process: {with}");
    println!(
        "  added at p50: {:.2} ms",
        with.percentile(0.5) - without.percentile(0.5)
    );
}
