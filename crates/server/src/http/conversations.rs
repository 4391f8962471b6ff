//! `/api/conversations`: what the server remembers of a conversation.

use axum::Json;
use axum::extract::State;
use ragstone_core::records::Millis;
use ragstone_search::conversations::{self, Conversation, ConversationId};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::PathText;
use super::state::AppState;

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "conversation_id": "chat-17", "topic": "retention of logs", "created_at": "2026-01-01T12:00:00Z",
    "updated_at": "2026-01-01T12:01:00Z", "expires_at": "2026-01-02T12:01:00Z",
    "turns": [{"message": "How long are logs kept?", "at": "2026-01-01T12:00:00Z"}],
}))]
pub(super) struct ConversationBody {
    conversation_id: String,
    /// What the next message is a follow-up to.
    topic: String,
    /// What the user said, the oldest first.
    turns: Vec<TurnBody>,
    created_at: String,
    updated_at: String,
    /// Forgotten then, unless it is carried on.
    expires_at: String,
}

#[derive(Serialize, ToSchema)]
struct TurnBody {
    message: String,
    at: String,
}

impl ConversationBody {
    fn new(id: ConversationId, conversation: Conversation) -> Self {
        Self {
            conversation_id: id.as_str().to_owned(),
            topic: conversation.topic,
            turns: conversation
                .turns
                .into_iter()
                .map(|turn| TurnBody {
                    message: turn.message,
                    at: time(turn.at),
                })
                .collect(),
            created_at: time(conversation.created_at),
            updated_at: time(conversation.updated_at),
            expires_at: time(conversation.expires_at),
        }
    }
}

fn time(at: Millis) -> String {
    jiff::Timestamp::from_millisecond(at).map_or_else(|_| String::new(), |time| time.to_string())
}

/// Read a conversation.
#[utoipa::path(
    get, path = "/api/conversations/{id}", tag = "gateway",
    params(("id" = String, Path, description = "The conversation")),
    responses((status = 200, body = ConversationBody), (status = 404, body = ErrorBody, description = "Unknown, or expired")),
)]
pub(super) async fn show(
    State(state): State<AppState>,
    PathText(id): PathText,
) -> Result<Json<ConversationBody>, ApiError> {
    let id = ConversationId::parse(id)?;
    let found = conversations::read(&state.conversations, &id, conversations::now()).await?;
    let conversation = found.ok_or_else(|| not_found(&id))?;
    Ok(Json(ConversationBody::new(id, conversation)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "deleted", "conversation_id": "chat-17"}))]
pub(super) struct ConversationDeleted {
    status: &'static str,
    conversation_id: String,
}

/// Forget a conversation.
#[utoipa::path(
    delete, path = "/api/conversations/{id}", tag = "gateway",
    params(("id" = String, Path, description = "The conversation")),
    responses((status = 200, body = ConversationDeleted), (status = 404, body = ErrorBody, description = "Unknown, or expired")),
)]
pub(super) async fn delete(
    State(state): State<AppState>,
    PathText(id): PathText,
) -> Result<Json<ConversationDeleted>, ApiError> {
    let id = ConversationId::parse(id)?;
    if !conversations::delete(&state.conversations, &id, conversations::now()).await? {
        return Err(not_found(&id));
    }
    Ok(Json(ConversationDeleted {
        status: "deleted",
        conversation_id: id.as_str().to_owned(),
    }))
}

fn not_found(id: &ConversationId) -> ApiError {
    ApiError::not_found(format!(
        "Conversation '{}' not found",
        ragstone_core::collection::shorten(id.as_str())
    ))
}
