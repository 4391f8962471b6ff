//! Guarantees of the compute queue, shown with a model whose progress the test controls.

use std::sync::mpsc;

use super::*;

/// Reports the lengths of its sequences and waits for permission to return.
struct Scripted {
    started: Mutex<mpsc::Sender<Vec<usize>>>,
    permission: Mutex<mpsc::Receiver<()>>,
}

fn scripted() -> (Arc<dyn Compute>, mpsc::Receiver<Vec<usize>>, mpsc::Sender<()>) {
    let (started, starts) = mpsc::channel();
    let (permit, permission) = mpsc::channel();
    (
        Arc::new(Scripted {
            started: Mutex::new(started),
            permission: Mutex::new(permission),
        }),
        starts,
        permit,
    )
}

impl Compute for Scripted {
    fn compute(&self, _: &ThreadGroup, _: &mut Scratch, sequences: &[&Sequence]) -> Vec<Vec<f32>> {
        let lengths = sequences.iter().map(|sequence| sequence.ids.len()).collect();
        self.started.lock().unwrap().send(lengths).unwrap();
        self.permission.lock().unwrap().recv().unwrap();
        assert!(
            sequences.iter().all(|sequence| sequence.ids[0] != 666),
            "cancellation for by a test"
        );
        sequences
            .iter()
            .map(|sequence| vec![sequence.ids[0] as f32])
            .collect()
    }
}

fn sequence(id: u32, length: usize) -> Sequence {
    Sequence {
        ids: vec![id; length],
        types: Vec::new(),
        pool_from: 0,
    }
}

fn engine(queue_tokens: usize, queue_requests: usize) -> Engine {
    Engine::start(EngineOptions {
        threads: Some(1),
        queue_tokens,
        queue_requests,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_query_overtakes_a_large_batch() {
    let engine = engine(1 << 20, 100);
    let (model, starts, permit) = scripted();
    let batch = (0..8).map(|id| sequence(id, 384)).collect();
    let (e, m) = (engine.clone(), model.clone());
    let large = tokio::spawn(async move { e.compute(m, batch).await });
    assert_eq!(starts.recv().unwrap(), [384]);
    let (e, m) = (engine.clone(), model.clone());
    let short = tokio::spawn(async move { e.compute(m, vec![sequence(99, 12)]).await });
    while engine.load().waiting_requests < 2 {
        tokio::task::yield_now().await;
    }
    permit.send(()).unwrap();
    assert_eq!(starts.recv().unwrap(), [12]);
    assert!(!large.is_finished());
    for _ in 0..8 {
        let _ = permit.send(());
    }
    assert_eq!(short.await.unwrap().unwrap(), [[99.0]]);
    let expected: Vec<Vec<f32>> = (0..8).map(|id| vec![id as f32]).collect();
    assert_eq!(large.await.unwrap().unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_queries_are_computed_together() {
    let engine = engine(1 << 20, 100);
    let (model, starts, permit) = scripted();
    let spawn = |id| {
        let (engine, model) = (engine.clone(), model.clone());
        tokio::spawn(async move { engine.compute(model, vec![sequence(id, 10)]).await })
    };
    let first = spawn(1);
    assert_eq!(starts.recv().unwrap(), [10]);
    let others: Vec<_> = (2..6).map(spawn).collect();
    while engine.load().waiting_requests < 4 {
        tokio::task::yield_now().await;
    }
    permit.send(()).unwrap();
    assert_eq!(starts.recv().unwrap(), [10; 4]);
    permit.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), [[1.0]]);
    for (id, other) in (2..6).zip(others) {
        assert_eq!(other.await.unwrap().unwrap(), [[id as f32]]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_future_gives_its_place_back() {
    let engine = engine(1 << 20, 100);
    let (model, starts, permit) = scripted();
    let batch = (0..50).map(|id| sequence(id, 384)).collect();
    let (e, m) = (engine.clone(), model.clone());
    let large = tokio::spawn(async move { e.compute(m, batch).await });
    starts.recv().unwrap();
    large.abort();
    drop(large.await);
    let (e, m) = (engine.clone(), model.clone());
    let next = tokio::spawn(async move { e.compute(m, vec![sequence(7, 3)]).await });
    permit.send(()).unwrap();
    assert_eq!(starts.recv().unwrap(), [3]);
    permit.send(()).unwrap();
    assert_eq!(next.await.unwrap().unwrap(), [[7.0]]);
    assert_eq!(engine.load().waiting_tokens, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_refuses_batches_first_and_then_everything() {
    let engine = engine(1_000, 4);
    let (model, starts, permit) = scripted();
    let mut requests = Vec::new();
    for (count, waiting) in [(1, 0), (10, 1)] {
        let (e, m) = (engine.clone(), model.clone());
        let batch = (0..count).map(|id| sequence(id, 384)).collect();
        requests.push(tokio::spawn(async move { e.compute(m, batch).await }));
        if waiting == 0 {
            starts.recv().unwrap();
        }
        while engine.load().waiting_requests < waiting {
            tokio::task::yield_now().await;
        }
    }
    let large = (0..10).map(|id| sequence(id, 384)).collect();
    let refused = engine.compute(model.clone(), large).await;
    assert!(
        matches!(refused, Err(ModelError::Overloaded { retry_after }) if retry_after >= Duration::from_secs(1))
    );
    for _ in 0..3 {
        let (e, m) = (engine.clone(), model.clone());
        let waiting = engine.load().waiting_requests + 1;
        requests.push(tokio::spawn(
            async move { e.compute(m, vec![sequence(1, 5)]).await },
        ));
        while engine.load().waiting_requests < waiting {
            tokio::task::yield_now().await;
        }
    }
    let refused = engine.compute(model, vec![sequence(1, 5)]).await;
    assert!(matches!(refused, Err(ModelError::Overloaded { .. })));
    for _ in 0..20 {
        let _ = permit.send(());
    }
    for request in requests {
        request.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_request_counts_with_its_own_tokens() {
    let engine = engine(4_000, 100);
    let (model, starts, permit) = scripted();
    let batch = |count: u32| (0..count).map(|id| sequence(id, 384)).collect::<Vec<_>>();
    let spawn = |count: u32| {
        let (e, m) = (engine.clone(), model.clone());
        tokio::spawn(async move { e.compute(m, batch(count)).await })
    };
    // More than the whole budget is let in where nothing waits, as it always would have to wait.
    let first = spawn(20);
    starts.recv().unwrap();
    assert_eq!(engine.load().waiting_tokens, 19 * 384);
    assert!(matches!(
        engine.compute(model.clone(), batch(3)).await,
        Err(ModelError::Overloaded { .. })
    ));
    for _ in 0..13 {
        permit.send(()).unwrap();
        starts.recv().unwrap();
    }
    // Six microbatches wait: four more fit into the budget, five do not.
    assert_eq!(engine.load().waiting_tokens, 6 * 384);
    assert!(matches!(
        engine.compute(model.clone(), batch(5)).await,
        Err(ModelError::Overloaded { .. })
    ));
    let second = spawn(4);
    while engine.load().waiting_requests < 2 {
        tokio::task::yield_now().await;
    }
    for _ in 0..11 {
        permit.send(()).unwrap();
    }
    assert_eq!(first.await.unwrap().unwrap().len(), 20);
    assert_eq!(second.await.unwrap().unwrap().len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_model_outputs_with_an_error_and_the_thread_goes_on() {
    let engine = engine(1_000, 10);
    let (model, _starts, permit) = scripted();
    permit.send(()).unwrap();
    let failed = engine.compute(model, vec![sequence(666, 3)]).await;
    assert!(matches!(failed, Err(ModelError::Failed(_))));
    // The failure poisoned what the first model holds, so another one shows that the only thread lives.
    let (model, _starts, permit) = scripted();
    permit.send(()).unwrap();
    let output = engine.compute(model, vec![sequence(5, 3)]).await.unwrap();
    assert_eq!(output, [[5.0]]);
    assert_eq!(engine.load().waiting_tokens, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_engine_ends_its_threads_and_outputs_who_waits() {
    let engine = engine(1 << 20, 10);
    let (model, starts, permit) = scripted();
    let state = engine.compute_threads.state.clone();
    let receiver = state
        .submit(model, (0..9).map(|id| sequence(id, 384)).collect())
        .unwrap();
    starts.recv().unwrap();
    // Dropping waits for the batch that is being computed, which waits for its permit.
    let dropping = tokio::task::spawn_blocking(move || drop(engine));
    while !state.lock().stopping {
        tokio::task::yield_now().await;
    }
    permit.send(()).unwrap();
    dropping.await.unwrap();
    assert!(receiver.await.is_err());
    assert_eq!(Arc::strong_count(&state), 1);
}

#[test]
fn groups_hold_every_sequence_once_and_are_of_similar_size() {
    for (lengths, threads) in [
        (vec![10; 100], 2),
        (vec![512; 3], 4),
        (vec![1], 8),
        ((1..200).collect(), 2),
    ] {
        let sequences: Vec<Sequence> = lengths.iter().map(|length| sequence(0, *length)).collect();
        let tokens = lengths.iter().sum();
        let microbatches = split_into_microbatches(&sequences, tokens, threads);
        let mut next = 0;
        for microbatch in &microbatches {
            assert!(microbatch.start == next && microbatch.end > microbatch.start);
            next = microbatch.end;
        }
        assert_eq!(next, sequences.len());
        let longest = *lengths.iter().max().unwrap();
        for microbatch in &microbatches {
            let size: usize = sequences[microbatch.clone()]
                .iter()
                .map(|sequence| sequence.ids.len())
                .sum();
            assert!(
                size <= MICROBATCH_TOKENS + longest / 2 + 1 || microbatch.len() == 1,
                "{size}"
            );
        }
    }
}
