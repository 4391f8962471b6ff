use proptest::prelude::*;

use super::*;

fn after(messages: &[(&str, f32)]) -> ConversationState {
    messages
        .iter()
        .fold(ConversationState::default(), |state, (message, similarity)| {
            next_plan(&state, message, Some(*similarity)).next
        })
}

fn next_plan(state: &ConversationState, message: &str, similarity: Option<f32>) -> QueryPlan {
    plan(state, message, similarity, &ContinuityWeights::default())
}

#[test]
fn the_first_message_is_searched_for_as_it_is() {
    let plan = next_plan(&ConversationState::default(), "  What is InstructLab?\n", None);
    assert_eq!(plan.standing, TopicRelation::First);
    assert_eq!(plan.query_text(), "  What is InstructLab?\n");
    assert_eq!(plan.variants.len(), 1);
    assert_eq!(plan.variants[0].keywords, plan.query_text());
    assert!(plan.variants[0].alone);
    assert_eq!(plan.topic, "What is InstructLab?");
    assert_eq!(plan.next.topic(), "What is InstructLab?");
}

#[test]
fn a_pronoun_is_resolved_by_the_topic() {
    let state = after(&[("What is InstructLab?", 0.0)]);
    let plan = next_plan(&state, "Does it integrate with OpenShift AI?", Some(0.35));
    assert_eq!(plan.standing, TopicRelation::Continues);
    assert_eq!(
        plan.query_text(),
        "What is InstructLab? Does it integrate with OpenShift AI?"
    );
    assert_eq!(plan.variants[0].keywords, "InstructLab integrate OpenShift AI");
    assert_eq!(plan.topic, plan.query_text());
    assert_eq!(plan.variants[1].text, "Does it integrate with OpenShift AI?");
    assert_eq!(plan.variants[1].keywords, "integrate OpenShift AI");
    assert!(!plan.variants[0].alone && plan.variants[1].alone);
}

/// However little the two have in common by the model.
#[test]
fn it_refers_to_what_was_said() {
    let state = after(&[("Which vector databases does the platform support?", 0.0)]);
    let plan = next_plan(&state, "Does it integrate with OpenShift AI?", Some(0.11));
    assert_eq!(plan.standing, TopicRelation::Continues);
    assert!(plan.topic.contains("vector databases"), "{}", plan.topic);
    let plan = next_plan(&state, "Does that also integrate with OpenShift AI?", Some(0.11));
    assert_eq!(plan.standing, TopicRelation::Continues);
}

#[test]
fn a_new_subject_is_searched_for_alone_first() {
    let state = after(&[
        ("What is InstructLab?", 0.0),
        ("Does it integrate with OpenShift AI?", 0.4),
    ]);
    let plan = next_plan(&state, "How do tulips survive cold winters?", Some(0.02));
    assert_eq!(plan.standing, TopicRelation::Changes);
    assert_eq!(plan.query_text(), "How do tulips survive cold winters?");
    assert_eq!(plan.topic, "How do tulips survive cold winters?");
    assert_eq!(plan.next.topic(), plan.topic);
}

#[test]
fn what_came_before_a_cut_stays_in_play_until_the_next_one() {
    let state = after(&[
        ("What is InstructLab?", 0.0),
        ("How do tulips survive cold winters?", 0.02),
    ]);
    let plan = next_plan(&state, "Do they need that?", Some(0.4));
    let texts: Vec<&str> = plan
        .variants
        .iter()
        .map(|variant| variant.text.as_str())
        .collect();
    assert_eq!(
        texts,
        [
            "How do tulips survive cold winters? Do they need that?",
            "What is InstructLab? How do tulips survive cold winters? Do they need that?",
            "Do they need that?",
        ]
    );
    assert_eq!(plan.topic, texts[0]);
    let cut_again = next_plan(&plan.next, "Which volcano erupted near Naples?", Some(0.0)).next;
    assert!(
        cut_again
            .topics_to_compare()
            .iter()
            .all(|topic| !topic.contains("InstructLab"))
    );
}

/// Two cuts that may both be wrong do not lose the first subject.
#[test]
fn an_unlikely_cut_is_taken_back_at_the_next_one() {
    let state = after(&[
        ("Which singles did the band release?", 0.0),
        ("chart positions abroad", 0.08),
    ]);
    assert_eq!(state.topic(), "chart positions abroad");
    let next = next_plan(&state, "sales figures of albums", Some(0.05)).next;
    assert_eq!(next.topic(), "sales figures of albums");
    assert!(
        next.topics_to_compare()[1].starts_with("Which singles did the band release? chart"),
        "{next:?}"
    );
}

#[test]
fn likeness_and_shared_words_speak_for_continuing() {
    let state = after(&[("Which singles did the band release?", 0.0)]);
    let continuity = |message, similarity| next_plan(&state, message, Some(similarity)).continuity;
    let message = "Chart positions in Europe";
    assert!(continuity(message, 0.6) > continuity(message, 0.1));
    assert!(continuity("Chart positions of singles", 0.1) > continuity("Chart positions of apples", 0.1));
    assert!(continuity("What else charted in Europe?", 0.1) > continuity("What charted in Europe?", 0.1));
    let odd = next_plan(&state, message, Some(f32::NAN)).continuity;
    assert_eq!(odd, next_plan(&state, message, None).continuity);
}

#[test]
fn messages_without_content_leave_the_topic_alone() {
    let state = after(&[("Which singles did the band release?", 0.0)]);
    for empty in ["Why?", "And then?", "", " \u{a0} ", "?!"] {
        assert_eq!(next_plan(&state, empty, Some(-1.0)).next, state, "{empty:?}");
    }
}

/// However little the model sees in common: what cannot stand alone belongs to what was said.
#[test]
fn what_means_nothing_alone_continues_the_topic() {
    for (first, then) in [
        (
            "How do I bake sourdough?",
            &["At what temperature?", "And for how long?", "What about rye?"][..],
        ),
        (
            "Can my landlord raise the rent?",
            &["With how much notice?", "How often?", "But not every year?"],
        ),
        (
            "Which plants grow in the desert?",
            &["Do they need food?", "Is that safe?"],
        ),
        (
            "What does a train to Vienna cost?",
            &["From which station?", "What about Prague?"],
        ),
    ] {
        let mut state = after(&[(first, 0.0)]);
        for message in then {
            let plan = next_plan(&state, message, Some(0.0));
            assert!(
                plan.topic.starts_with(first) && plan.topic.ends_with(message),
                "{message}: {}",
                plan.topic
            );
            assert_eq!(plan.variants[plan.reported()].text, plan.topic);
            state = plan.next;
        }
    }
}

#[test]
fn courtesies_leave_the_topic_alone_and_search_for_it() {
    let state = after(&[("How do I bake sourdough?", 0.0), ("At what temperature?", 0.1)]);
    for courtesy in ["thanks", "Ok, thank you!", "Great."] {
        let plan = next_plan(&state, courtesy, Some(0.0));
        assert_eq!(plan.next, state);
        assert_eq!(plan.topic, "How do I bake sourdough? At what temperature?");
        assert_eq!(plan.query_text(), plan.topic);
    }
    let greeted = next_plan(&ConversationState::default(), "Hello!", None);
    assert_eq!((greeted.query_text(), greeted.topic.as_str()), ("Hello!", ""));
    assert_eq!(greeted.next, ConversationState::default());
}

/// What can stand alone may still open a subject, also with such words in it.
#[test]
fn whole_questions_still_change_the_subject() {
    let state = after(&[("How do I bake sourdough?", 0.0)]);
    for message in [
        "How do I renew my passport?",
        "At what temperature does lead melt in a vacuum?",
        "Who was the first person to cross the Antarctic on skis with their dogs?",
        "And which documents do dual citizens need at the border?",
    ] {
        let plan = next_plan(&state, message, Some(-0.3));
        assert_eq!(plan.topic, message);
        assert!(plan.variants[plan.reported()].alone);
    }
}

#[test]
fn nothing_is_said_twice() {
    let state = after(&[
        ("Who wrote Dune?", 0.0),
        ("When was Dune written?", 0.9),
        ("who wrote  dune?", 0.9),
    ]);
    assert_eq!(state.topic(), "When was Dune written? who wrote dune?");
}

#[test]
fn a_long_conversation_keeps_its_first_message_and_the_newest() {
    let messages: Vec<String> = (0..200)
        .map(|n| format!("And what of this chapter{n}?"))
        .collect();
    let said: Vec<(&str, f32)> = messages.iter().map(|message| (message.as_str(), 0.9)).collect();
    let topic = after(&said).topic();
    assert!(topic.starts_with("And what of this chapter0? "), "{topic}");
    assert!(topic.ends_with(" And what of this chapter199?"), "{topic}");
    assert!(topic.chars().count() <= MAX_TOPIC_CHARS);
}

#[test]
fn the_state_survives_being_stored() {
    let state = after(&[
        ("What is InstructLab?", 0.0),
        ("How do tulips survive cold winters?", 0.02),
    ]);
    let stored = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<ConversationState>(&stored).unwrap(), state);
    assert_eq!(
        serde_json::from_str::<ConversationState>("{}").unwrap(),
        ConversationState::default()
    );
}

proptest! {
    #[test]
    fn any_conversation_stays_bounded_and_is_planned_alike_twice(
        messages in prop::collection::vec((any::<String>(), prop::option::of(any::<f32>())), 0..12),
        long in 0..3000usize,
    ) {
        let mut state = ConversationState::default();
        let long = "ǅ\u{301}漢 ".repeat(long);
        for (message, similarity) in messages.iter().map(|(m, s)| (m.as_str(), *s)).chain([(long.as_str(), None)]) {
            let plan = next_plan(&state, message, similarity);
            prop_assert_eq!(&plan, &next_plan(&state, message, similarity));
            prop_assert!((0.0..=1.0).contains(&plan.continuity));
            let total: f64 = plan.variants.iter().map(|variant| variant.weight).sum();
            prop_assert!((total - 1.0).abs() < 1e-9);
            prop_assert!(is_courtesy(message) || plan.variants.iter().any(|variant| variant.text == message));
            prop_assert!(plan.variants.windows(2).all(|pair| pair[0].weight >= pair[1].weight));
            prop_assert!(plan.topic.chars().count() <= MAX_TOPIC_CHARS);
            prop_assert!(!plan.topic.contains(char::is_control));
            let next = plan.next;
            prop_assert!(next.topics_to_compare().iter().all(|topic| topic.chars().count() <= MAX_TOPIC_CHARS));
            prop_assert!(serde_json::to_string(&next).unwrap().len() <= 8 * 2 * MAX_TOPIC_CHARS + 1000);
            state = next;
        }
    }
}

#[test]
fn asking_for_more_leaves_the_topic_as_it_is() {
    let state = after(&[("Can I bring my dog to the office?", 0.0)]);
    for message in ["Can you elaborate?", "really?", "Why?", "please explain"] {
        let plan = next_plan(&state, message, Some(0.0));
        assert_eq!(plan.next.topic(), state.topic(), "{message}");
        assert!(plan.query_text().starts_with("Can I bring my dog"), "{message}");
    }
}

/// A subject may be opened without being noticed, and is then that of the next message.
#[test]
fn the_last_message_counts_by_itself_as_much_as_it_was_doubted() {
    let asked = |similarity: f32| {
        let state = after(&[
            ("How do I bake sourdough bread?", 0.0),
            ("Which flour does the bread need?", similarity),
        ]);
        let plan = next_plan(&state, "Is there a cheaper kind of it?", Some(0.5));
        let narrow = plan
            .variants
            .iter()
            .find(|variant| variant.text == "Which flour does the bread need? Is there a cheaper kind of it?")
            .map(|variant| variant.weight);
        let total: f64 = plan.variants.iter().map(|variant| variant.weight).sum();
        assert!((total - 1.0).abs() < 1e-9);
        narrow
    };
    let doubted = asked(0.1).unwrap();
    assert!((0.02..0.3).contains(&doubted), "{doubted}");
    assert_eq!(asked(0.9), None);
}

/// Two close subjects make one topic; what is asked more of is the last one.
#[test]
fn an_ellipsis_asks_more_of_the_last_question_that_stands_alone() {
    let mut state = after(&[
        ("How do I bake sourdough bread?", 0.0),
        ("How do I cook beans?", 0.6),
    ]);
    assert!(state.topic().contains("sourdough"), "{}", state.topic());
    for message in ["How long?", "And with how much salt?", "At what temperature?"] {
        let plan = next_plan(&state, message, Some(0.1));
        let first = plan.query_text();
        assert!(
            first.starts_with("How do I cook beans?") && first.ends_with(message),
            "{first}"
        );
        let weights: f64 = plan.variants.iter().map(|variant| variant.weight).sum();
        assert!((weights - 1.0).abs() < 1e-9);
        assert!(
            plan.topic.contains("sourdough"),
            "the topic is whole: {}",
            plan.topic
        );
        state = plan.next;
    }
    // Where the last question needs the one before, the topic is what is meant.
    let state = after(&[("Who was Nikola Tesla?", 0.0), ("Where was he born?", 0.5)]);
    let plan = next_plan(&state, "And when?", Some(0.1));
    assert!(
        plan.query_text().starts_with("Who was Nikola Tesla?"),
        "{}",
        plan.query_text()
    );
}
