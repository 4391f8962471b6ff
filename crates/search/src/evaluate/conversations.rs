//! Questions in conversations: what the server makes of them, against what else could be searched for.

use futures::{StreamExt, TryStreamExt};
use ragstone_core::backend::BackendError;
use ragstone_core::collection::CollectionName;
use ragstone_core::measures::{Judgements, measure};
use ragstone_core::model::ModelError;
use ragstone_core::search::{SearchMode, SearchQuery};

use super::dialogues::{Dialogue, DialogueTurn, spliced};
use super::modes::scored;
use crate::conversations::{ConversationId, Conversations, advance, now};
use crate::fanout::{self, FanoutQuery, ModeChoice, Target};
use crate::gateway::NamedBackend;
use crate::plan::{Plan, by_topic};
use crate::storage_backend::StorageBackend;

/// The measure looks no deeper.
const TOP_K: usize = 10;
/// So many conversations are held at once, which gives the model batches to work on.
const AT_ONCE: usize = 8;

/// What is searched for when a user has typed something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryWording {
    /// The message alone.
    LastTurn,
    /// All that the user has typed in this conversation.
    AllTurns,
    /// What the server makes of it when it is told which conversation the message belongs to.
    Ours,
    /// The message with everything put in that it refers to, by a person.
    Rewrite,
}

impl QueryWording {
    pub fn name(self) -> &'static str {
        match self {
            Self::LastTurn => "last turn alone",
            Self::AllTurns => "all turns joined",
            Self::Ours => "ours",
            Self::Rewrite => "human rewrite",
        }
    }
}

/// One kind of turns, and how well each wording finds what they are about.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub name: &'static str,
    pub turns: usize,
    pub rows: Vec<MeasureRow>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasureRow {
    pub wording: QueryWording,
    /// Mean nDCG@10 of `/query` in hybrid mode, where the wording is one text.
    pub query: Option<f64>,
    /// Mean nDCG@10 of `/api/rag/collect`.
    pub collect: f64,
}

/// Where in a conversation a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TurnKind {
    First,
    FollowUp,
    AfterChange,
    LaterAfterChange,
}

impl TurnKind {
    const ALL: [TurnKind; 4] = [
        TurnKind::FollowUp,
        TurnKind::First,
        TurnKind::AfterChange,
        TurnKind::LaterAfterChange,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::First => "first turns",
            Self::FollowUp => "follow-up turns",
            Self::AfterChange => "turns right after a change of subject",
            Self::LaterAfterChange => "later turns after a change of subject",
        }
    }

    fn wordings(self) -> &'static [QueryWording] {
        match self {
            // It is all the turns there are.
            Self::First => &[QueryWording::LastTurn, QueryWording::Ours, QueryWording::Rewrite],
            Self::FollowUp => &[
                QueryWording::LastTurn,
                QueryWording::AllTurns,
                QueryWording::Ours,
                QueryWording::Rewrite,
            ],
            // The turns are those of the whole dialogues, where the rewrite was measured.
            Self::AfterChange | Self::LaterAfterChange => {
                &[QueryWording::LastTurn, QueryWording::AllTurns, QueryWording::Ours]
            }
        }
    }
}

/// The nDCG@10 of one wording of one turn.
struct Measured {
    kind: TurnKind,
    wording: QueryWording,
    query: Option<f64>,
    collect: f64,
}

/// One conversation to hold: what is said before the turns that count, and what these are about.
struct Script<'a> {
    id: String,
    before: &'a [DialogueTurn],
    turns: &'a [DialogueTurn],
    relevant: &'a Judgements,
}

/// Holds every dialogue as it is, and spliced to others so that it changes its subject.
pub async fn evaluate_conversations(
    backend: &StorageBackend,
    conversations: &Conversations,
    name: &CollectionName,
    dialogues: &[Dialogue],
) -> Result<Vec<Group>, BackendError> {
    let target = Target {
        service: NamedBackend::local(backend.clone()),
        name: name.clone(),
    };
    let whole = dialogues.iter().enumerate().map(|(number, dialogue)| Script {
        id: format!("whole {number}"),
        before: &[],
        turns: &dialogue.turns,
        relevant: &dialogue.relevant,
    });
    let changing = spliced(dialogues)
        .into_iter()
        .enumerate()
        .map(|(number, spliced)| Script {
            id: format!("spliced {number}"),
            before: spliced.before,
            turns: &spliced.after.turns,
            relevant: &spliced.after.relevant,
        });
    // A closure that borrows its argument would keep these futures from being sent to other threads.
    let mut held = Vec::new();
    for script in whole.chain(changing) {
        held.push(hold(conversations, &target, script));
    }
    let measured: Vec<Vec<Measured>> = futures::stream::iter(held)
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    let measured: Vec<Measured> = measured.into_iter().flatten().collect();
    Ok(TurnKind::ALL
        .into_iter()
        .map(|kind| group(kind, &measured))
        .filter(|group| group.turns > 0)
        .collect())
}

fn group(kind: TurnKind, measured: &[Measured]) -> Group {
    let of = |wording: QueryWording| {
        measured
            .iter()
            .filter(move |one| one.kind == kind && one.wording == wording)
    };
    let rows = kind.wordings().iter().filter_map(|&wording| {
        let count = of(wording).count();
        let mean = |values: f64| values / count as f64;
        (count > 0).then(|| MeasureRow {
            wording,
            query: of(wording).map(|one| one.query).sum::<Option<f64>>().map(mean),
            collect: mean(of(wording).map(|one| one.collect).sum()),
        })
    });
    Group {
        name: kind.name(),
        turns: of(QueryWording::Ours).count(),
        rows: rows.collect(),
    }
}

/// Says everything in turn, and measures what each turn that counts finds.
async fn hold(
    conversations: &Conversations,
    target: &Target,
    script: Script<'_>,
) -> Result<Vec<Measured>, BackendError> {
    let id = ConversationId::parse(script.id.as_str())?;
    let mut said: Vec<&str> = Vec::new();
    for turn in script.before {
        advance(conversations, &id, &turn.user, now()).await?;
        said.push(&turn.user);
    }
    let mut measured = Vec::new();
    for (number, turn) in script.turns.iter().enumerate() {
        let kind = match (script.before.is_empty(), number) {
            (true, 0) => TurnKind::First,
            (true, _) => TurnKind::FollowUp,
            (false, 0) => TurnKind::AfterChange,
            (false, _) => TurnKind::LaterAfterChange,
        };
        let plan = advance(conversations, &id, &turn.user, now()).await?;
        said.push(&turn.user);
        for &wording in kind.wordings() {
            let text = match wording {
                QueryWording::LastTurn => Some(turn.user.clone()),
                QueryWording::AllTurns => Some(said.join(" ")),
                QueryWording::Ours => None,
                QueryWording::Rewrite => match &turn.rewrite {
                    Some(rewrite) => Some(rewrite.clone()),
                    None => continue,
                },
            };
            let plan = match &text {
                Some(text) => by_topic(text, None, None),
                None => plan.clone(),
            };
            measured.push(Measured {
                kind,
                wording,
                query: match text {
                    Some(text) => Some(queried(target, text, script.relevant).await?),
                    None => None,
                },
                collect: collected(target, &plan, script.relevant).await?,
            });
        }
    }
    Ok(measured)
}

/// As `/api/rag/collect` does it in a conversation.
async fn collected(target: &Target, plan: &Plan, relevant: &Judgements) -> Result<f64, BackendError> {
    let query = FanoutQuery::for_plan(
        plan,
        vec![target.clone()],
        TOP_K,
        ModeChoice::Best,
        target.service.clone(),
    );
    let mut response = fanout::search(&query).await;
    if let Some((_, error)) = response.failures.pop() {
        return Err(error);
    }
    if let Some(warning) = response.warnings.pop() {
        return Err(ModelError::Failed(warning.message).into());
    }
    let found = response
        .hits
        .into_iter()
        .map(|hit| hit.hit.document.id.into_string());
    Ok(ndcg(&found.collect::<Vec<_>>(), relevant))
}

/// As `/query` does it.
async fn queried(target: &Target, text: String, relevant: &Judgements) -> Result<f64, BackendError> {
    let query = SearchQuery {
        text: Some(text),
        top_k: TOP_K,
        mode: SearchMode::Hybrid,
        ..SearchQuery::default()
    };
    let response = target
        .service
        .backend
        .search(&target.name, query.validate()?)
        .await?;
    let found = response.hits.into_iter().map(|hit| hit.document.id.into_string());
    Ok(ndcg(&found.collect::<Vec<_>>(), relevant))
}

fn ndcg(found: &[String], relevant: &Judgements) -> f64 {
    measure(&scored(found), relevant).ndcg_10
}
