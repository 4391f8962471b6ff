//! From a source into a collection.

use std::collections::VecDeque;
use std::time::Duration;

use ragstone_core::CollectionName;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::backoff::{Backoff, RetryLimits};
use ragstone_core::call::CallError;
use ragstone_core::collection::shorten;
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::{ExportedDocument, StorageError, VectorPrecision};

use crate::format::{ExportClaim, Head, Sum, Summing};
use crate::{BackendSource, DocumentSource, TransferError, TransferProgress};

const RETRY: Backoff = Backoff {
    max_attempts: 10,
    first_delay: Duration::from_millis(100),
    max_delay: Duration::from_secs(10),
    jitter: 0.0,
};

/// What a move came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transferred {
    pub sum: Sum,
    /// Of these, how many were there from an earlier attempt.
    pub already_there: u64,
}

/// Makes `name` at the target hold the documents of the source, no others, in their order.
///
/// The collection must not be there, or be empty, or hold the first of the documents; else nothing
/// is changed.
pub async fn transfer(
    source: &mut dyn DocumentSource,
    head: &Head,
    target: &dyn Backend,
    name: &CollectionName,
    progress: &TransferProgress,
) -> Result<Transferred, TransferError> {
    let created = ensure_collection(target, name, head).await?;
    let mut stored = 0;
    match fill(source, target, name, progress, &mut stored).await {
        Ok(moved) => Ok(moved),
        Err(Broken::Other(error)) => Err(error),
        Err(Broken::Source(TransferError::Backend(BackendError::Invalid(problem)))) => {
            let left = match created {
                Created::Now => target.delete_collection(name).await.is_err(),
                Created::Before => stored > 0,
            };
            Err(InvalidInput::new(if left {
                format!(
                    "{problem}. Of what came before, {stored} documents were stored in collection '{name}': delete \
                     them, or mend the source and import it again, which goes on after them"
                )
            } else {
                format!("{problem}. Nothing of it was kept")
            })
            .into())
        }
        Err(Broken::Source(error)) => Err(error),
    }
}

/// Whose fault it is that a move broke off.
enum Broken {
    Source(TransferError),
    Other(TransferError),
}

impl From<TransferError> for Broken {
    fn from(error: TransferError) -> Self {
        Self::Other(error)
    }
}

impl From<BackendError> for Broken {
    fn from(error: BackendError) -> Self {
        Self::Other(error.into())
    }
}

/// `stored` tells how many documents were added.
async fn fill(
    source: &mut dyn DocumentSource,
    target: &dyn Backend,
    name: &CollectionName,
    progress: &TransferProgress,
    stored: &mut usize,
) -> Result<Transferred, Broken> {
    let vectors = target.vector_precision().await?;
    let mut there = BackendSource::new(target, name);
    let mut sums = Sums::new(vectors);
    let rest = match common_beginning(source, &mut there, &mut sums, progress).await {
        Err(Different::Damaged(error)) => return Err(Broken::Source(error)),
        other => other.map_err(|error| explain(error, name))?,
    };
    let already_there = sums.documents();
    let mut read_back = sums.comparable.clone();
    let mut last = there.last();
    let begun_at = last;

    let mut batch: Vec<ExportedDocument> = rest.into();
    while !batch.is_empty() {
        let before = sums.documents();
        batch.iter().for_each(|moved| sums.add(moved));
        let written = with_retry(|| target.import(name, batch.clone()));
        // Whatever becomes of the source, it is known what was stored.
        let (written, next) = futures::future::join(written, source.next()).await;
        written?;
        *stored += batch.len();
        if vectors == VectorPrecision::Rounded {
            // Their sum says nothing of them, so they are compared one by one while they are at hand.
            let mut added = BackendSource::after(target, name, last);
            let compared = compare(&batch, &mut added, before).await;
            compared.map_err(|error| explain(error, name))?;
            last = added.last();
        }
        progress.add(batch.len());
        batch = next.map_err(Broken::Source)?;
    }
    let (sum, comparable) = sums.finish();
    check_claim(source.claim(), &sum).map_err(|problem| Broken::Source(problem.into()))?;

    let mut added = BackendSource::after(target, name, begun_at);
    loop {
        let page = added.next().await?;
        if page.is_empty() {
            break;
        }
        page.iter().for_each(|moved| read_back.add(moved));
    }
    let read_back = read_back.finish();
    if read_back != comparable {
        let different = InvalidInput::new(format!(
            "collection '{name}' does not hold what was moved: {} documents with checksum {} were sent, {} with {} are \
             there. Was something else written to it meanwhile?",
            comparable.documents, comparable.sha256, read_back.documents, read_back.sha256
        ));
        return Err(Broken::Other(different.into()));
    }
    Ok(Transferred { sum, already_there })
}

/// What was moved, as it was, and as the target can give it back.
struct Sums {
    exact: Summing,
    comparable: Summing,
}

impl Sums {
    fn new(vectors: VectorPrecision) -> Self {
        Self {
            exact: Summing::default(),
            comparable: Summing::comparing(vectors),
        }
    }

    fn add(&mut self, moved: &ExportedDocument) {
        self.exact.add(moved);
        self.comparable.add(moved);
    }

    fn documents(&self) -> u64 {
        self.exact.documents()
    }

    fn finish(self) -> (Sum, Sum) {
        (self.exact.finish(), self.comparable.finish())
    }
}

/// How far apart two numbers may be of which one was rounded.
const ROUNDING: f32 = 1e-6;

fn same(here: &ExportedDocument, there: &ExportedDocument, vectors: VectorPrecision) -> bool {
    let close = |a: &f32, b: &f32| match vectors {
        VectorPrecision::Exact => a == b,
        VectorPrecision::Rounded => (a - b).abs() <= ROUNDING,
    };
    here.document == there.document
        && here.norm == there.norm
        && here.model == there.model
        && here.vector.len() == there.vector.len()
        && here.vector.iter().zip(&there.vector).all(|(a, b)| close(a, b))
}

/// Whether the next documents of the target are these.
async fn compare(
    batch: &[ExportedDocument],
    added: &mut BackendSource<'_>,
    before: u64,
) -> Result<(), Different> {
    let mut compared = 0;
    while compared < batch.len() {
        let page = added.next().await?;
        for (here, there) in batch.iter().skip(compared).zip(&page) {
            if !same(here, there, VectorPrecision::Rounded) {
                return Err(Different::new(before + compared as u64 + 1, here, there));
            }
            compared += 1;
        }
        if page.is_empty() {
            // The sums will differ, and tell.
            return Ok(());
        }
    }
    Ok(())
}

pub(super) fn check_claim(claim: Option<&ExportClaim>, sum: &Sum) -> Result<(), InvalidInput> {
    let Some(claim) = claim else { return Ok(()) };
    let problem = match &claim.sha256 {
        _ if claim.documents != sum.documents => format!(
            "it says that it has {} documents, and has {}",
            claim.documents, sum.documents
        ),
        Some(sha256) if *sha256 != sum.sha256 => format!(
            "it says that its documents have the checksum {sha256}, and they have {}",
            sum.sha256
        ),
        _ => return Ok(()),
    };
    Err(InvalidInput::new(format!("the source is damaged: {problem}")))
}

/// Whether this run made the collection.
enum Created {
    Now,
    Before,
}

async fn ensure_collection(
    target: &dyn Backend,
    name: &CollectionName,
    head: &Head,
) -> Result<Created, TransferError> {
    match target.collection(name).await {
        Ok(there) if there.metadata == head.metadata => Ok(Created::Before),
        Ok(_) => Err(InvalidInput::new(format!(
            "collection '{name}' is there and has other metadata: name a collection that is not there, or delete it first"
        ))
        .into()),
        Err(BackendError::CollectionNotFound(_)) => {
            target.create_collection(name, head.metadata.clone()).await?;
            Ok(Created::Now)
        }
        Err(error) => Err(error.into()),
    }
}

/// Why what is there is not the beginning of what is moved.
enum Different {
    Document {
        number: u64,
        there: String,
        here: String,
    },
    More {
        documents: u64,
    },
    /// The source is at fault.
    Damaged(TransferError),
    Failed(TransferError),
}

impl Different {
    fn new(number: u64, here: &ExportedDocument, there: &ExportedDocument) -> Self {
        Self::Document {
            number,
            there: there.document.id.to_string(),
            here: here.document.id.to_string(),
        }
    }
}

impl From<TransferError> for Different {
    fn from(error: TransferError) -> Self {
        Self::Failed(error)
    }
}

fn explain(different: Different, name: &CollectionName) -> TransferError {
    let problem = match different {
        Different::Damaged(error) | Different::Failed(error) => return error,
        Different::More { documents } => format!(
            "collection '{name}' holds more than the {documents} documents that are moved: it is not left from an earlier attempt"
        ),
        Different::Document { number, there, here } if there == here => format!(
            "collection '{name}' holds other documents: number {number}, {:?}, is not the same",
            shorten(&here)
        ),
        Different::Document { number, there, here } => format!(
            "collection '{name}' holds other documents: number {number} is {:?} there, and {:?} in what is moved",
            shorten(&there),
            shorten(&here)
        ),
    };
    InvalidInput::new(format!(
        "{problem}. Name a collection that is not there, or delete it first"
    ))
    .into()
}

/// Goes through both as far as the target reaches; gives what was read of the source beyond that.
async fn common_beginning(
    source: &mut dyn DocumentSource,
    there: &mut BackendSource<'_>,
    sum: &mut Sums,
    progress: &TransferProgress,
) -> Result<VecDeque<ExportedDocument>, Different> {
    let mut ours = VecDeque::new();
    let mut theirs: VecDeque<ExportedDocument> = VecDeque::new();
    loop {
        if ours.is_empty() {
            ours = source.next().await.map_err(Different::Damaged)?.into();
        }
        if theirs.is_empty() {
            theirs = there.next().await?.into();
        }
        if theirs.is_empty() {
            return Ok(ours);
        }
        if ours.is_empty() {
            return Err(Different::More {
                documents: sum.documents(),
            });
        }
        let before = sum.documents();
        while let (Some(here), Some(found)) = (ours.front(), theirs.front()) {
            if !same(here, found, sum.comparable.vectors()) {
                return Err(Different::new(sum.documents() + 1, here, found));
            }
            sum.add(here);
            ours.pop_front();
            theirs.pop_front();
        }
        progress.add((sum.documents() - before) as usize);
    }
}

/// Retries while a store or server is busy. Importing the same documents twice has the effect of once.
pub(super) async fn with_retry<T, F>(call: impl Fn() -> F) -> Result<T, BackendError>
where
    F: Future<Output = Result<T, BackendError>>,
{
    let mut attempts = 0;
    loop {
        let error = match call().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        attempts += 1;
        let retry_after = match &error {
            BackendError::Storage(StorageError::Unavailable { retry_after, .. }) => Some(*retry_after),
            BackendError::Call(CallError::Answered(answer)) if answer.status == 503 => answer.retry_after,
            _ => return Err(error),
        };
        let limits = RetryLimits {
            retry_after: retry_after.map(|delay| delay.clamp(RETRY.first_delay, RETRY.max_delay)),
            ..RetryLimits::default()
        };
        let Some(delay) = RETRY.retry(attempts, 1.0, limits) else {
            return Err(error);
        };
        tracing::debug!(%error, attempts, "retrying");
        tokio::time::sleep(delay).await;
    }
}
