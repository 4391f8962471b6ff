//! Parsing in a process of its own, which is limited and may be killed.
//!
//! The child reads documents from its standard input and writes texts to its standard output, each
//! with its length before it. A child that takes too long is killed. One that exceeds its memory or
//! stack dies. In each case the document gets a reason, and the next one a new child.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::{DocumentText, Unreadable, parse};
use crate::kind::FileKind;

/// A waiting parent looks this often whether its document is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Documents that one child parses at most, so that what a parser leaks is returned.
const MAX_DOCUMENTS: u32 = 256;

const PARSED: u8 = 0;
const REFUSED: u8 = 1;

/// The command of a child that runs [`serve`], and its limits.
#[derive(Debug, Clone)]
pub struct IsolatedReader {
    pub program: PathBuf,
    /// The name of the kind is added as the last argument.
    pub arguments: Vec<OsString>,
    /// For one document.
    pub timeout: Duration,
    pub max_text_bytes: u64,
}

/// The child's side: parses documents until standard input ends. The caller has limited this process.
pub fn serve(kind: FileKind, mut input: impl Read, mut output: impl Write) -> io::Result<()> {
    let mut length = [0; 8];
    loop {
        match input.read_exact(&mut length) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut bytes = Vec::new();
        input
            .by_ref()
            .take(u64::from_le_bytes(length))
            .read_to_end(&mut bytes)?;
        let (status, answer) = match parse(kind, &bytes) {
            Ok(text) => (PARSED, serde_json::to_vec(&text)?),
            Err(problem) => (REFUSED, problem.0.into_bytes()),
        };
        output.write_all(&[status])?;
        output.write_all(&(answer.len() as u64).to_le_bytes())?;
        output.write_all(&answer)?;
        output.flush()?;
    }
}

/// The answer to one document.
enum Parsed {
    Text(Vec<u8>),
    Refused(String),
    TooLong,
}

/// A child, and the thread that talks to it.
#[derive(Debug)]
pub(super) struct ReaderProcess {
    kind: FileKind,
    child: Child,
    documents: Sender<Vec<u8>>,
    answers: Receiver<io::Result<Parsed>>,
    parsed: u32,
}

impl Drop for ReaderProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl IsolatedReader {
    /// Parses a document in `process`, which is started where needed and dropped when it failed.
    /// `is_cancelled` ends the wait early.
    pub(super) fn read(
        &self,
        process: &mut Option<ReaderProcess>,
        kind: FileKind,
        bytes: Vec<u8>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<DocumentText, Unreadable> {
        let mut running = match process.take() {
            Some(running) if running.kind == kind && running.parsed < MAX_DOCUMENTS => running,
            _ => self
                .start(kind)
                .map_err(|error| Unreadable::new(format!("no process to read it in: {error}")))?,
        };
        running.parsed += 1;
        let died = || {
            Unreadable::new(format!(
                "reading this {} takes more memory or stack than is allowed",
                kind.name()
            ))
        };
        running.documents.send(bytes).map_err(|_| died())?;
        match self.wait(&running, is_cancelled)? {
            Some(Parsed::Text(text)) => {
                *process = Some(running);
                serde_json::from_slice(&text)
                    .map_err(|error| Unreadable::new(format!("the process that reads it failed: {error}")))
            }
            Some(Parsed::Refused(problem)) => {
                *process = Some(running);
                Err(Unreadable::new(problem))
            }
            Some(Parsed::TooLong) => Err(Unreadable::new(format!(
                "it has more than {} MB of text",
                self.max_text_bytes >> 20
            ))),
            None => Err(died()),
        }
    }

    /// `None` for a child that died.
    fn wait(
        &self,
        process: &ReaderProcess,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Parsed>, Unreadable> {
        let deadline = Instant::now() + self.timeout;
        loop {
            match process.answers.recv_timeout(POLL_INTERVAL) {
                Ok(answer) => return Ok(answer.ok()),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if is_cancelled() => {
                    return Err(Unreadable::new("reading it was cancelled"));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    return Err(Unreadable::new(format!(
                        "reading it takes longer than {} s",
                        self.timeout.as_secs()
                    )));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn start(&self, kind: FileKind) -> io::Result<ReaderProcess> {
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(kind.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let no_pipe = || io::Error::other("no pipe");
        let mut input = child.stdin.take().ok_or_else(no_pipe)?;
        let mut output = child.stdout.take().ok_or_else(no_pipe)?;
        let (documents, to_parse) = channel::<Vec<u8>>();
        let (answer, answers) = channel();
        let limit = self.max_text_bytes;
        // Ends with the child, whose death closes the pipes, or with its owner.
        std::thread::spawn(move || {
            for bytes in to_parse {
                let parsed = exchange(&mut input, &mut output, &bytes, limit);
                let failed = parsed.is_err();
                if answer.send(parsed).is_err() || failed {
                    return;
                }
            }
        });
        Ok(ReaderProcess {
            kind,
            child,
            documents,
            answers,
            parsed: 0,
        })
    }
}

/// Sends one document and receives its text.
fn exchange(input: &mut impl Write, output: &mut impl Read, bytes: &[u8], limit: u64) -> io::Result<Parsed> {
    input.write_all(&(bytes.len() as u64).to_le_bytes())?;
    input.write_all(bytes)?;
    input.flush()?;
    let (mut status, mut length) = ([0], [0; 8]);
    output.read_exact(&mut status)?;
    output.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > limit {
        return Ok(Parsed::TooLong);
    }
    let mut answer = Vec::new();
    if output.take(length).read_to_end(&mut answer)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(match status {
        [PARSED] => Parsed::Text(answer),
        _ => Parsed::Refused(String::from_utf8_lossy(&answer).into_owned()),
    })
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::read::TextBody;

    fn shell(script: &str, timeout: Duration) -> IsolatedReader {
        IsolatedReader {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into(), "sh".into()],
            timeout,
            max_text_bytes: 1 << 20,
        }
    }

    #[test]
    fn a_child_parses_one_document_after_another() {
        let mut input = Vec::new();
        for page in ["<p>one", "<p>two", ""] {
            input.extend((page.len() as u64).to_le_bytes());
            input.extend(page.as_bytes());
        }
        let mut output = Vec::new();
        serve(FileKind::Html, &input[..], &mut output).unwrap();
        let mut answers = &output[..];
        for page in ["one", "two", ""] {
            let parsed = exchange(&mut Vec::new(), &mut answers, b"", 1 << 20).unwrap();
            let Parsed::Text(text) = parsed else { panic!() };
            let text: DocumentText = serde_json::from_slice(&text).unwrap();
            assert_eq!(text.body, TextBody::Page(page.to_owned()));
        }
        assert!(answers.is_empty());
    }

    #[test]
    fn every_failure_of_a_child_has_a_reason() {
        let refusal = "head -c 1048584 >/dev/null; printf '\\001\\005\\000\\000\\000\\000\\000\\000\\000no: x'; sleep 60";
        let long =
            "head -c 1048584 >/dev/null; printf '\\000\\377\\377\\377\\000\\000\\000\\000\\000'; sleep 60";
        let (short, ample) = (Duration::from_millis(200), Duration::from_secs(60));
        for (script, timeout, reason, is_kept) in [
            (refusal, ample, "no: x", true),
            (long, ample, "more than 1 MB of text", false),
            ("kill -9 $$", ample, "takes more memory or stack", false),
            ("exec sleep 60", short, "takes longer than 0 s", false),
            ("printf x", ample, "takes more memory or stack", false),
        ] {
            let mut process = None;
            let bytes = vec![b'x'; 1 << 20];
            let refused = shell(script, timeout)
                .read(&mut process, FileKind::Pdf, bytes, &|| false)
                .unwrap_err();
            assert!(refused.0.contains(reason), "{script}: {refused}");
            assert_eq!(process.is_some(), is_kept, "{script}");
        }
    }

    #[test]
    fn a_document_that_is_cancelled_kills_its_child() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        let script = format!(
            "echo $$ > {0}.part; mv {0}.part {0}; exec sleep 600",
            pid_file.display()
        );
        let reader = shell(&script, Duration::from_secs(600));
        let started = AtomicBool::new(false);
        let refused = reader.read(&mut None, FileKind::Html, Vec::new(), &|| {
            started.store(pid_file.exists(), Ordering::Relaxed);
            started.load(Ordering::Relaxed)
        });
        assert_eq!(refused.unwrap_err().0, "reading it was cancelled");
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        assert!(
            !std::path::Path::new("/proc").join(pid.trim()).exists(),
            "the child is still there"
        );
    }
}
