//! Connections to the database are encrypted, and its certificate is verified.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::support::Setup;
use crate::support::postgres::Engine;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Installs a certificate for these names and enables TLS.
async fn encrypt(engine: &Engine, authority: &Authority, names: &[&str]) {
    let key = KeyPair::generate().unwrap();
    let all: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let certificate = CertificateParams::new(all)
        .unwrap()
        .signed_by(&key, authority)
        .unwrap();
    // Unique file names, so that the path shows which certificate the server has loaded.
    let certificate_file = engine.home().join(format!("{}.crt", names[0]));
    let key_file = engine.home().join(format!("{}.key", names[0]));
    write_for_owner(&certificate_file, &certificate.pem(), engine.home());
    write_for_owner(&key_file, &key.serialize_pem(), engine.home());
    let (client, connection) = tokio_postgres::connect(&engine.url(), tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    for statement in [
        format!(
            "ALTER SYSTEM SET ssl_cert_file = '{}'",
            certificate_file.display()
        ),
        format!("ALTER SYSTEM SET ssl_key_file = '{}'", key_file.display()),
        "ALTER SYSTEM SET ssl = on".to_owned(),
        "SELECT pg_reload_conf()".to_owned(),
    ] {
        client.batch_execute(&statement).await.unwrap();
    }
    // The reload is asynchronous.
    loop {
        let row = client.query_one("SHOW ssl_cert_file", &[]).await.unwrap();
        if Path::new(row.get::<_, &str>(0)) == certificate_file {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Postgres requires that it owns the file of its key.
fn write_for_owner(path: &Path, text: &str, home: &Path) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let owner = std::fs::metadata(home).unwrap();
    chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
}

fn setup(engine: &Engine, root: &Authority) -> Setup {
    let setup = Setup::serve_embedded().arg("--no-embeddings");
    let file = setup.file("root.crt", &root.pem());
    let url = format!(
        "{}?sslmode=verify-full&sslrootcert={}",
        engine.url(),
        file.display()
    );
    setup.env("RAGSTONE_STORE", url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_encrypted_and_the_certificate_is_verified() {
    let engine = tokio::task::spawn_blocking(Engine::start).await.unwrap();
    let root = authority();
    encrypt(&engine, &root, &["127.0.0.1"]).await;
    let server = setup(&engine, &root).start().await;
    server.create("c").await;
    let (client, connection) = tokio_postgres::connect(&engine.url(), tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let sql =
        "SELECT count(*) FILTER (WHERE ssl), count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
               WHERE application_name = 'ragstone'";
    let row = client.query_one(sql, &[]).await.unwrap();
    let (encrypted, all): (i64, i64) = (row.get(0), row.get(1));
    assert!(encrypted > 0 && encrypted == all, "{encrypted} of {all}");
    drop(server);

    let stranger = setup(&engine, &authority());
    let refused = tokio::task::spawn_blocking(move || stranger.run()).await.unwrap();
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("certificate"), "{refused:?}");
    assert!(!refused.stderr.contains("postgres:postgres"), "{refused:?}");

    encrypt(&engine, &root, &["elsewhere.example"]).await;
    let misnamed = setup(&engine, &root);
    let refused = tokio::task::spawn_blocking(move || misnamed.run()).await.unwrap();
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("certificate"), "{refused:?}");
}
