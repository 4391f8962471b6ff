//! Labelled dialogues: `corpus.jsonl` and `dialogs.jsonl`.

use std::path::Path;

use ragstone_core::error::InvalidInput;
use ragstone_core::measures::Judgements;
use serde::Deserialize;

use super::folder::read_lines;

const DIALOGUES: &str = "dialogs.jsonl";

/// What one user typed, and which documents every one of the messages is about.
#[derive(Debug, Clone, PartialEq)]
pub struct Dialogue {
    pub id: String,
    pub relevant: Judgements,
    pub turns: Vec<DialogueTurn>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct DialogueTurn {
    /// As it was typed.
    pub user: String,
    /// The same by a person who put in all it refers to: a reference, never an input of the method.
    #[serde(default)]
    pub rewrite: Option<String>,
}

#[derive(Deserialize)]
struct DialogueLine {
    dialog_id: String,
    relevant: Vec<String>,
    turns: Vec<DialogueTurn>,
}

pub fn read_dialogues(folder: &Path) -> Result<Vec<Dialogue>, InvalidInput> {
    let mut dialogues = Vec::new();
    for (at, line) in read_lines::<DialogueLine>(folder, DIALOGUES)? {
        if line.turns.iter().any(|turn| turn.user.trim().is_empty()) {
            return Err(at.problem("a turn has no text"));
        }
        if line.turns.is_empty() || line.relevant.is_empty() {
            return Err(at.problem("a dialogue needs 'turns' and 'relevant' documents"));
        }
        dialogues.push(Dialogue {
            id: line.dialog_id,
            relevant: line.relevant.into_iter().map(|id| (id, 1)).collect(),
            turns: line.turns,
        });
    }
    Ok(dialogues)
}

/// The numbers of the method were chosen on one half of the dialogues; figures are reported on the
/// other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The 1st, 3rd, 5th, … dialogue of the file.
    Tuning,
    /// The 2nd, 4th, 6th, …
    Reported,
}

impl Half {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tuning => "tuning",
            Self::Reported => "reported",
        }
    }

    pub fn of(self, dialogues: Vec<Dialogue>) -> Vec<Dialogue> {
        let first = match self {
            Self::Tuning => 0,
            Self::Reported => 1,
        };
        dialogues.into_iter().skip(first).step_by(2).collect()
    }
}

/// A conversation that changes its subject: the beginning of one dialogue, then all of another.
pub(super) struct Spliced<'a> {
    pub(super) before: &'a [DialogueTurn],
    pub(super) after: &'a Dialogue,
}

/// How many other dialogues each one is put behind.
const SPLICES: usize = 2;

/// The same for the same dialogues, always: each behind the first few turns of some others, where how
/// many turns runs through all there can be. One that ends with the dialogue it is spliced to is none.
pub(super) fn spliced(dialogues: &[Dialogue]) -> Vec<Spliced<'_>> {
    let count = dialogues.len();
    let mut spliced = Vec::with_capacity(count * SPLICES);
    for round in 1..=SPLICES {
        // Far apart, and another partner each round.
        let distance = count * round / (SPLICES + 1);
        for (place, after) in dialogues.iter().enumerate() {
            let before = &dialogues[(place + distance) % count];
            if before.relevant == after.relevant {
                continue;
            }
            let turns = 1 + (place + round) % before.turns.len();
            spliced.push(Spliced {
                before: &before.turns[..turns],
                after,
            });
        }
    }
    spliced
}
