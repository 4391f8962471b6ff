//! Reading in a process of its own, which can be stopped and may die.
//!
//! The parent sends the file to the child's standard input and takes the text from its standard
//! output. A child that takes too long is killed; one that runs out of the memory it gave itself, or
//! of stack, ends itself; in each case the parent has a sentence to say and goes on.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::{ReadOptions, Unreadable, html, pdf};
use crate::ingest::kind::Kind;

/// How a child that runs [`confined`] is started.
#[derive(Debug, Clone)]
pub struct IsolatedReader {
    pub program: PathBuf,
    /// The name of the kind is added as the last argument.
    pub arguments: Vec<OsString>,
    pub timeout: Duration,
    pub max_text_bytes: u64,
}

/// The child's side: the text of what is on standard input. The caller has set limits on this
/// process already, and prints the text or the reason.
pub fn confined(kind: Kind, bytes: &[u8]) -> Result<String, Unreadable> {
    match kind {
        Kind::Pdf => pdf::extract(bytes, &ReadOptions::default()),
        Kind::Html => html::convert(bytes),
        other => Err(Unreadable::new(format!(
            "{} is not read in a process of its own",
            other.name()
        ))),
    }
}

impl IsolatedReader {
    pub(super) fn read(&self, kind: Kind, bytes: &[u8]) -> Result<String, Unreadable> {
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(kind.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Unreadable::new(format!("no process to read it in: {error}")))?;
        let outcome = self.converse(&mut child, bytes);
        // Whatever happened, the child must not outlive this call.
        let _ = child.kill();
        let status = child.wait();
        let (text, said) = outcome?;
        match status {
            Ok(status) if status.success() => String::from_utf8(text)
                .map_err(|_| Unreadable::new(format!("this {} gives text that is not UTF-8", kind.name()))),
            Ok(status) if status.code() == Some(1) && !said.trim().is_empty() => {
                Err(Unreadable::new(said.trim()))
            }
            _ => Err(Unreadable::new(format!(
                "reading this {} takes more memory or stack than is allowed",
                kind.name()
            ))),
        }
    }

    /// The child's whole output, or the reason not to wait for it any longer.
    fn converse(&self, child: &mut Child, bytes: &[u8]) -> Result<(Vec<u8>, String), Unreadable> {
        let no_pipe = || Unreadable::new("no pipe to the process that reads it");
        let mut stdin = child.stdin.take().ok_or_else(no_pipe)?;
        let stdout = child.stdout.take().ok_or_else(no_pipe)?;
        let stderr = child.stderr.take().ok_or_else(no_pipe)?;
        let limit = self.max_text_bytes;
        let (sender, receiver) = mpsc::channel();
        let input = bytes.to_vec();
        // These threads end with the child, whose death closes their pipes.
        std::thread::spawn(move || {
            // A child that refuses early closes its end; what it says counts, not the broken pipe.
            let _ = stdin.write_all(&input);
        });
        std::thread::spawn(move || {
            let said = std::thread::spawn(move || {
                let mut said = String::new();
                let _ = stderr.take(4096).read_to_string(&mut said);
                said
            });
            let mut text = Vec::new();
            let read = stdout.take(limit + 1).read_to_end(&mut text);
            // Joined only when the output ended, or a child that goes on talking would hold it up.
            let said = if text.len() as u64 > limit {
                String::new()
            } else {
                said.join().unwrap_or_default()
            };
            let _ = sender.send(read.map(|_| (text, said)));
        });
        match receiver.recv_timeout(self.timeout) {
            Ok(Ok((text, _))) if text.len() as u64 > limit => Err(Unreadable::new(format!(
                "it has more than {} MB of text",
                limit >> 20
            ))),
            Ok(Ok(heard)) => {
                // The output is complete; give the child a moment to end by itself.
                for _ in 0..100 {
                    if !matches!(child.try_wait(), Ok(None)) {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(heard)
            }
            Ok(Err(error)) => Err(Unreadable::new(format!(
                "the process that reads it broke off: {error}"
            ))),
            Err(_) => Err(Unreadable::new(format!(
                "reading it takes longer than {} s",
                self.timeout.as_secs()
            ))),
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> IsolatedReader {
        IsolatedReader {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into(), "sh".into()],
            timeout: Duration::from_millis(500),
            max_text_bytes: 1 << 20,
        }
    }

    #[test]
    fn what_the_child_prints_is_the_text() {
        assert_eq!(
            shell("echo kind=$1; cat").read(Kind::Pdf, b"abc").unwrap(),
            "kind=pdf\nabc"
        );
    }

    #[test]
    fn every_bad_end_of_a_child_is_a_sentence() {
        for (script, sentence) in [
            ("echo 'it is odd' >&2; exit 1", "it is odd"),
            ("kill -9 $$", "takes more memory or stack"),
            ("exec sleep 60", "takes longer than 0 s"),
            ("exec yes", "more than 1 MB of text"),
            ("printf '\\377'", "not UTF-8"),
        ] {
            let refused = shell(script).read(Kind::Pdf, &vec![b'x'; 1 << 20]).unwrap_err();
            assert!(refused.0.contains(sentence), "{script}: {refused}");
        }
    }
}
