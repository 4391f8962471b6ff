use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder, Url};
use serde_json::{Value, json};

use super::answer::Answer;
use super::setup::Setup;

/// Generous limit for events that always happen on a working server, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running server; dropping it kills it without warning.
pub struct Server {
    setup: Setup,
    child: Child,
    log: Log,
    pub address: SocketAddr,
    http: reqwest::Client,
}

impl Server {
    pub async fn start(setup: Setup) -> Self {
        tokio::task::spawn_blocking(move || Self::start_blocking(setup))
            .await
            .expect("the server starts")
    }

    pub fn start_blocking(setup: Setup) -> Self {
        let mut child = setup
            .build()
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = Log::follow(child.stderr.take().expect("stderr is piped"));
        let line = log.wait_for("listening on http://");
        let address = line.rsplit("http://").next().unwrap_or_default();
        let address = address.split(['"', ' ']).next().unwrap_or_default();
        let address = address
            .parse()
            .unwrap_or_else(|_| panic!("no address in: {line}"));
        // Ignores the proxy settings of the environment.
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .expect("an HTTP client");
        Self {
            setup,
            child,
            log,
            address,
            http,
        }
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Waits for a log line that contains `part`, and returns it.
    pub fn wait_for_log(&self, part: &str) -> String {
        self.log.wait_for(part)
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM, as service managers do.
    pub fn terminate(&self) {
        let sent = Command::new("sh")
            .args(["-c", "kill -TERM \"$0\"", &self.child.id().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()), "the signal is sent");
    }

    /// Sends SIGTERM and waits for the server to exit.
    pub fn stop(mut self) -> (ExitStatus, String) {
        self.terminate();
        let status = self.wait_for_exit();
        (status, self.log.whole())
    }

    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("the server can be waited for") {
                return status;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "the server does not stop; its log:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the server with SIGKILL.
    pub fn kill(mut self) -> Setup {
        self.child.kill().expect("the server is killed");
        self.child.wait().expect("the server is gone");
        self.setup.clone()
    }

    /// Restarts the server on the same data.
    pub async fn restarted(self) -> Self {
        let setup = self.setup.clone();
        let (status, log) = self.stop();
        assert!(status.success(), "{log}");
        Self::start(setup).await
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, self.url(path))
    }

    pub async fn send(&self, request: RequestBuilder) -> Answer {
        let response = request
            .send()
            .await
            .unwrap_or_else(|error| panic!("{error}; the log:\n{}", self.log()));
        Answer::read(response).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn get_with(&self, path: &str, query: &[(&str, &str)]) -> Answer {
        let url = Url::parse_with_params(&self.url(path), query).expect("a URL");
        self.send(self.http.get(url)).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(self.request(Method::POST, path).json(&body)).await
    }

    pub async fn put(&self, path: &str, body: Value) -> Answer {
        self.send(self.request(Method::PUT, path).json(&body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    pub async fn delete_with(&self, path: &str, body: Value) -> Answer {
        self.send(self.request(Method::DELETE, path).json(&body)).await
    }

    /// Sends a raw body.
    pub async fn send_text(&self, method: Method, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        self.send(
            self.request(method, path)
                .header("content-type", "application/json")
                .body(body),
        )
        .await
    }

    /// Creates a collection and asserts success.
    pub async fn create(&self, name: &str) {
        self.post("/collections", json!({ "name": name })).await.ok();
    }

    /// Adds documents and asserts success.
    pub async fn add(&self, collection: &str, documents: Vec<Value>) -> Value {
        self.post(
            &format!("/collections/{collection}/documents"),
            json!({ "documents": documents }),
        )
        .await
        .ok()
    }

    /// Documents that match a filter.
    pub async fn find(&self, collection: &str, filter: Value) -> Answer {
        self.get_with(
            &format!("/collections/{collection}/documents"),
            &[("where", &filter.to_string())],
        )
        .await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The stderr output of a process so far.
#[derive(Clone)]
struct Log(Arc<(Mutex<Collected>, Condvar)>);

#[derive(Default)]
struct Collected {
    text: String,
    ended: bool,
}

impl Log {
    fn follow(pipe: impl std::io::Read + Send + 'static) -> Self {
        let log = Self(Arc::default());
        let writer = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).split(b'\n') {
                let Ok(line) = line else { break };
                let (collected, changed) = &*writer.0;
                let mut collected = collected.lock().expect("the log");
                collected.text.push_str(&String::from_utf8_lossy(&line));
                collected.text.push('\n');
                changed.notify_all();
            }
            let (collected, changed) = &*writer.0;
            collected.lock().expect("the log").ended = true;
            changed.notify_all();
        });
        log
    }

    fn text(&self) -> String {
        self.0.0.lock().expect("the log").text.clone()
    }

    /// The complete log, once the process has closed its stderr.
    fn whole(&self) -> String {
        let (collected, changed) = &*self.0;
        let guard = collected.lock().expect("the log");
        let (guard, _) = changed
            .wait_timeout_while(guard, TIMEOUT, |log| !log.ended)
            .expect("the log");
        guard.text.clone()
    }

    fn wait_for(&self, part: &str) -> String {
        let (collected, changed) = &*self.0;
        let guard = collected.lock().expect("the log");
        let wanted = |log: &Collected| {
            log.text
                .lines()
                .find(|line| line.contains(part))
                .map(str::to_owned)
        };
        let (guard, _) = changed
            .wait_timeout_while(guard, TIMEOUT, |log| !log.ended && wanted(log).is_none())
            .expect("the log");
        wanted(&guard).unwrap_or_else(|| panic!("no line with {part:?} in the log:\n{}", guard.text))
    }
}
